package journal

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"testing"

	nodev1 "github.com/space-sandbox/space/internal/gen/space/node/v1"
)

// copyDir copies a journal, as a crash would leave it.
func copyDir(t *testing.T, from string) string {
	t.Helper()
	to := t.TempDir()
	must(t, os.CopyFS(to, os.DirFS(from)))
	return to
}

// lastSegment returns the path of the newest segment of a process in dir.
func lastSegment(t *testing.T, dir string, p *Process) string {
	t.Helper()
	firsts, err := listSegments(filepath.Join(dir, string(p.id)))
	if err != nil || len(firsts) == 0 {
		t.Fatalf("segments: %v, %v", firsts, err)
	}
	return segmentPath(filepath.Join(dir, string(p.id)), firsts[len(firsts)-1])
}

func TestTornTailAtEveryByte(t *testing.T) {
	j := openT(t, t.TempDir(), Options{})
	p := createT(t, j, 0)
	startT(t, p)
	for range 3 {
		must(t, p.AppendOutput(stdout, []byte("0123456789")))
	}
	whole, err := os.ReadFile(lastSegment(t, j.dir, p))
	must(t, err)
	record := headerSize + outputHeader + 10
	for cut := range whole {
		dir := copyDir(t, j.dir)
		must(t, os.Truncate(lastSegment(t, dir, p), int64(cut)))
		again, err := Open(dir, Options{})
		must(t, err)
		q, err := again.Process(p.ID())
		must(t, err)
		evs := 0
		if body := cut - (len(whole) - 3*record); body >= 0 {
			evs = 1 + body/record
		}
		if evs > 0 && int(q.LastID()) != evs {
			t.Fatalf("cut at %d: last event is %d, expected %d", cut, q.LastID(), evs)
		}
		if evs > 0 { // goes on with the next ID
			must(t, q.AppendOutput(stdout, []byte("more")))
			exitT(t, q)
			got, err := drain(t, q, nil)
			must(t, err)
			if data, _ := bytesOf(t, got, stdout); len(data) != (evs-1)*10+4 {
				t.Fatalf("cut at %d: %q", cut, data)
			}
		}
		must(t, again.Close())
	}
}

func TestTornNewSegmentFallsBack(t *testing.T) {
	j := openT(t, t.TempDir(), Options{})
	p := createT(t, j, 64<<10)
	startT(t, p)
	for range 3 {
		must(t, p.AppendOutput(stdout, make([]byte, 4096)))
	}
	dir := copyDir(t, j.dir)
	must(t, os.WriteFile(segmentPath(filepath.Join(dir, string(p.id)), p.LastID()+1), []byte("torn"), 0o600))
	for _, open := range []func(string) (*Journal, error){
		OpenReadOnly, func(d string) (*Journal, error) { return Open(d, Options{}) },
	} {
		again, err := open(dir)
		must(t, err)
		q, err := again.Process(p.ID())
		must(t, err)
		if q.LastID() != p.LastID() || q.Record().GetStdoutBytes() != 3*4096 {
			t.Fatalf("last event %d of %d", q.LastID(), p.LastID())
		}
		must(t, again.Close())
	}
}

// damage flips one byte of a file.
func damage(t *testing.T, path string, at int) {
	t.Helper()
	b, err := os.ReadFile(path)
	must(t, err)
	b[at] ^= 0x40
	must(t, os.WriteFile(path, b, 0o600))
}

func TestDamageIsNeverDelivered(t *testing.T) {
	j := openT(t, t.TempDir(), Options{})
	p := createT(t, j, 64<<10)
	startT(t, p)
	var want []byte
	for i := range 20 {
		chunk := bytes.Repeat([]byte{byte('a' + i)}, 700)
		want = append(want, chunk...)
		must(t, p.AppendOutput(stdout, chunk))
	}
	exitT(t, p)
	firsts, err := listSegments(p.dir)
	must(t, err)
	if len(firsts) < 3 {
		t.Fatalf("only %d segments", len(firsts))
	}
	for _, first := range firsts {
		path := segmentPath(string(p.id), first)
		size := int(must2(os.Stat(filepath.Join(j.dir, path))).Size())
		for at := 0; at < size; at += 97 {
			dir := copyDir(t, j.dir)
			damage(t, filepath.Join(dir, path), at)
			checkDamaged(t, dir, p, want)
		}
	}
}

func must2[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

// checkDamaged reads a damaged journal: what comes is right, what is missing is announced, the exit is there.
func checkDamaged(t *testing.T, dir string, p *Process, want []byte) {
	t.Helper()
	ro := must2(OpenReadOnly(dir))
	q, err := ro.Process(p.ID())
	must(t, err)
	evs, err := drain(t, q, nil)
	if err != nil && !errors.Is(err, ErrCorrupt) {
		t.Fatal(err)
	}
	announced := err != nil
	var id uint64
	for _, ev := range evs {
		if r := ev.GetResync(); r != nil {
			announced = true
			id = r.GetFirstAvailableId() - 1
			continue
		}
		if ev.GetDropped() != nil { // an unreadable first segment looks like a dropped one
			announced = true
			id = ev.GetId()
			continue
		}
		if ev.GetId() != id+1 {
			t.Fatalf("event %d after %d", ev.GetId(), id)
		}
		id = ev.GetId()
		if o := ev.GetOutput(); o != nil {
			if !bytes.Equal(o.GetData(), want[o.GetOffset():int(o.GetOffset())+len(o.GetData())]) {
				t.Fatalf("wrong bytes in event %d", id)
			}
		}
	}
	if !announced && q.Record().GetState() == nodev1.ProcessState_PROCESS_STATE_EXITED {
		t.Fatalf("damage went unnoticed: %d events", len(evs))
	}
}

func TestMissingSegmentIsAnnounced(t *testing.T) {
	j := openT(t, t.TempDir(), Options{})
	p := createT(t, j, 64<<10)
	startT(t, p)
	for range 20 {
		must(t, p.AppendOutput(stdout, make([]byte, 1000)))
	}
	exitT(t, p)
	firsts, err := listSegments(p.dir)
	must(t, err)
	must(t, os.Remove(segmentPath(p.dir, firsts[1])))
	evs, err := drain(t, p, nil) // the open journal
	must(t, err)
	missing := 0
	for _, ev := range evs {
		missing += int(ev.GetResync().GetDroppedEvents())
	}
	if missing != int(firsts[2]-firsts[1]) {
		t.Fatalf("%d events announced as missing, %d are", missing, firsts[2]-firsts[1])
	}
	ro := must2(OpenReadOnly(j.dir))
	q, err := ro.Process(p.ID())
	must(t, err)
	again, err := drain(t, q, nil)
	must(t, err)
	if len(again) != len(evs) {
		t.Fatalf("after a restart %d events, before %d", len(again), len(evs))
	}
}

func TestDamagedRecordHidesOnlyItsProcess(t *testing.T) {
	j := openT(t, t.TempDir(), Options{})
	a, b := createT(t, j, 0), createT(t, j, 0)
	must(t, j.Close())
	damage(t, filepath.Join(a.dir, metaFile), 9)
	ro := must2(OpenReadOnly(j.dir))
	procs, _ := ro.List("", 10)
	if len(procs) != 1 || procs[0].ID() != b.ID() || len(ro.Damaged()) != 1 || !errors.Is(ro.Damaged()[0], ErrCorrupt) {
		t.Fatalf("%d processes, damaged %v", len(procs), ro.Damaged())
	}
}

func TestMissingFolder(t *testing.T) {
	if _, err := OpenReadOnly(filepath.Join(t.TempDir(), "nothing")); !errors.Is(err, os.ErrNotExist) {
		t.Fatalf("no folder: %v", err)
	}
}
