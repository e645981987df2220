package e2e

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sort"
	"strconv"
	"strings"
	"testing"
	"time"
)

// footprint is everything on the host that sandboxes of a server could leave behind.
func (s *server) footprint(t *testing.T) map[string]string {
	t.Helper()
	f := map[string]string{}
	shims, vmms := s.children(t)
	f["processes"] = strconv.Itoa(len(shims) + len(vmms))
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	f["mounts"] = strconv.Itoa(strings.Count(string(mounts), "\n"))
	fds, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", s.cmd.Process.Pid))
	if err != nil {
		t.Fatal(err)
	}
	f["fds"] = strconv.Itoa(len(fds))
	var files []string
	err = filepath.WalkDir(s.dir, func(path string, _ fs.DirEntry, err error) error {
		if err == nil && !strings.Contains(path, "space.db") {
			files = append(files, path)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	sort.Strings(files)
	f["files"] = strings.Join(files, "\n")
	cgroups, _ := filepath.Glob("/sys/fs/cgroup/unified/space/*/*")
	plain, _ := filepath.Glob("/sys/fs/cgroup/space/*/*")
	f["cgroups"] = strconv.Itoa(len(cgroups) + len(plain))
	sockets, _ := filepath.Glob("/run/space/*/*")
	f["sockets"] = strconv.Itoa(len(sockets))
	return f
}

func TestTwentySandboxesLeaveNothing(t *testing.T) {
	s := ownServer(t, "--pool-size", "0")
	warm := s.create(t, nil)
	s.sh(t, warm.ID, "true")
	s.remove(t, warm.ID)
	httpClient.CloseIdleConnections()
	before := s.footprint(t)
	jobs := make(chan int)
	errs := make(chan error, 4)
	for range 4 {
		go func() {
			var failed error
			for range jobs {
				if failed == nil {
					failed = s.pythonAndNode()
				}
			}
			errs <- failed
		}()
	}
	for n := range 20 {
		jobs <- n
	}
	close(jobs)
	for range 4 {
		if err := <-errs; err != nil {
			t.Error(err)
		}
	}
	var differ []string
	err := poll(20*time.Second, func() (bool, error) {
		httpClient.CloseIdleConnections()
		differ = nil
		for k, v := range s.footprint(t) {
			if v != before[k] && (k != "fds" || atoi(v) > atoi(before[k])+2) {
				differ = append(differ, fmt.Sprintf("%s: before\n%s\nafter\n%s", k, before[k], v))
			}
		}
		return len(differ) == 0, nil
	})
	if err != nil {
		t.Errorf("left behind:\n%s", strings.Join(differ, "\n"))
	}
}

func atoi(s string) int {
	n, _ := strconv.Atoi(s)
	return n
}

// pythonAndNode creates a sandbox, runs both, and deletes it.
func (s *server) pythonAndNode() error {
	var a acceptedJSON
	if _, err := s.callErr("POST", "/v1/sandboxes", object{"template": "base"}, &a, "Prefer", "wait=60"); err != nil {
		return err
	}
	for _, argv := range [][]string{{"python3", "-c", "print(6*7)"}, {"node", "-e", "console.log(6*7)"}} {
		var c commandJSON
		if _, err := s.callErr("POST", "/v1/sandboxes/"+a.Sandbox.ID+"/commands", object{"argv": argv}, &c); err != nil {
			return err
		}
		var r result
		if err := s.stream(c.Session, 0, time.Minute, func(e event) bool { return r.add(e) == nil }); err != nil {
			return err
		}
		if r.stdout.String() != "42\n" || r.code() != 0 {
			return fmt.Errorf("%v: %q %q code %d", argv, r.stdout.String(), r.stderr.String(), r.code())
		}
	}
	var d acceptedJSON
	_, err := s.callErr("DELETE", "/v1/sandboxes/"+a.Sandbox.ID, nil, &d, "Prefer", "wait=60")
	if err == nil && d.Operation.State != "succeeded" {
		err = fmt.Errorf("delete ended %s", d.Operation.State)
	}
	return err
}

func TestClonesDiffer(t *testing.T) {
	t.Parallel()
	one, two := shared.create(t, nil), shared.create(t, nil)
	for name, line := range map[string]string{
		"urandom":       "head -c 32 /dev/urandom | od -An -tx1",
		"getrandom":     "python3 -c 'import os; print(os.getrandom(32).hex())'",
		"kernel's UUID": "cat /proc/sys/kernel/random/uuid",
		"python's UUID": "python3 -c 'import uuid; print(uuid.uuid4())'",
		"machine-id":    "cat /etc/machine-id",
		"host name":     "hostname",
		"generation":    "cat /run/space/generation; cat /etc/machine-id",
	} {
		if a, b := shared.sh(t, one.ID, line), shared.sh(t, two.ID, line); a == b || strings.TrimSpace(a) == "" {
			t.Errorf("%s: %q and %q", name, a, b)
		}
	}
	for _, sb := range []sandboxJSON{one, two} {
		before := time.Now()
		ns, err := strconv.ParseInt(strings.TrimSpace(shared.sh(t, sb.ID, "date +%s%N")), 10, 64)
		if err != nil {
			t.Fatal(err)
		}
		guest := time.Unix(0, ns)
		if guest.Before(before.Add(-500*time.Millisecond)) || guest.After(time.Now().Add(500*time.Millisecond)) {
			t.Errorf("the guest's clock says %s at %s", guest, before)
		}
		source := strings.TrimSpace(shared.sh(t, sb.ID, "cat /sys/devices/system/clocksource/clocksource0/current_clocksource"))
		if source != "tsc" && source != "kvm-clock" {
			t.Errorf("clock source %s", source)
		}
	}
}

// TestTimeKeepsItsPaceUnderLoad compares the guest's monotonic clock with the host's while the guest is busy.
func TestTimeKeepsItsPaceUnderLoad(t *testing.T) {
	t.Parallel()
	sb := shared.create(t, nil)
	load := shared.command(t, sb.ID, []string{"sh", "-c", "for i in 1 2 3; do (while :; do :; done) & done; wait"}, object{"start": "now", "timeout_s": 60})
	c := shared.command(t, sb.ID, []string{"python3", "-uc", `
import time
a = time.monotonic()
print("begin")
for i in range(500): time.sleep(0.01)
print("end", time.monotonic() - a)`}, nil)
	var began, ended time.Time
	var r result
	err := shared.stream(c.Session, 0, time.Minute, func(e event) bool {
		_ = r.add(e)
		if began.IsZero() && strings.Contains(r.stdout.String(), "begin") {
			began = time.Now()
		}
		if ended.IsZero() && strings.Contains(r.stdout.String(), "end") {
			ended = time.Now()
		}
		return true
	})
	if err != nil || r.code() != 0 {
		t.Fatalf("%v, code %d: %s", err, r.code(), r.stderr.String())
	}
	guest, err := strconv.ParseFloat(strings.Fields(r.stdout.String())[2], 64)
	if err != nil {
		t.Fatal(err)
	}
	host := ended.Sub(began).Seconds()
	if lost := host - guest; lost > 0.5 || lost < -0.5 {
		t.Errorf("the guest counted %.2f s while %.2f s passed", guest, host)
	}
	shared.call(t, "POST", "/v1/sandboxes/"+sb.ID+"/processes/"+load.Process.ID+"/kill", nil, nil)
}

func TestWorkloadNetworkHasNoWayOut(t *testing.T) {
	t.Parallel()
	sb := shared.create(t, nil)
	for _, target := range []string{"169.254.0.22 80", "1.1.1.1 443", "127.0.0.1 1024", "169.254.1.1 1024", "169.254.1.2 1024", "169.254.0.21 1024"} {
		line := "python3 -c \"import socket,sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 2)\" " + target
		if r := shared.exec(t, sb.ID, "sudo", "sh", "-c", line); r.code() == 0 {
			t.Errorf("%s can be reached from the guest", target)
		}
	}
	if links := shared.sh(t, sb.ID, "sudo ip -o link | wc -l"); strings.TrimSpace(links) != "2" {
		t.Errorf("the guest's root sees %s links, want lo and eth0", links)
	}
}

func TestRecordLists(t *testing.T) {
	s := ownServer(t)
	var ids []string
	for i := range 5 {
		ids = append(ids, s.create(t, object{"metadata": object{"n": strconv.Itoa(i), "all": "yes"}}).ID)
	}
	var got []string
	cursor := ""
	for {
		var page struct {
			Items      []sandboxJSON
			NextCursor string `json:"next_cursor"`
		}
		s.call(t, "GET", "/v1/sandboxes?limit=2&metadata[all]=yes&cursor="+cursor, nil, &page)
		for _, sb := range page.Items {
			got = append(got, sb.ID)
		}
		if cursor = page.NextCursor; cursor == "" {
			break
		}
	}
	sort.Strings(got)
	sort.Strings(ids)
	if strings.Join(got, " ") != strings.Join(ids, " ") {
		t.Errorf("listed %v, made %v", got, ids)
	}
	s.refused(t, 400, "invalid_request", "GET", "/v1/sandboxes?limt=2", nil)
	s.refused(t, 400, "invalid_request", "GET", "/v1/sandboxes?cursor=!", nil)
	var sb sandboxJSON
	s.call(t, "PATCH", "/v1/sandboxes/"+ids[0], object{"metadata": object{"new": "1"}}, &sb)
	if sb.Metadata["new"] != "1" {
		t.Errorf("patched: %+v", sb.Metadata)
	}
	s.refused(t, 412, "failed_precondition", "PATCH", "/v1/sandboxes/"+ids[0], object{"metadata": object{}}, "If-Match", `"1"`)
	e := s.refused(t, 412, "failed_precondition", "POST", "/v1/sandboxes/"+ids[0]+"/pause", nil)
	if e.Details.Remediation == "" {
		t.Error("pause says nothing to do instead")
	}
	e = s.refused(t, 412, "failed_precondition", "POST", "/v1/sandboxes", object{"template": "base", "environment": "E0"})
	if e.Details.Remediation == "" {
		t.Error("E0 says nothing to do instead")
	}
	s.refused(t, 404, "not_found", "GET", "/v1/nothing", nil)
	s.refused(t, 404, "not_found", "POST", "/v1/sandboxes", object{"template": "nope"})
	s.refused(t, 400, "invalid_request", "POST", "/v1/sandboxes", object{"template": "base", "resources": object{"vcpu": 9999}})
}
