package proc

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/space-sandbox/space/internal/agent/users"
	agentv1 "github.com/space-sandbox/space/internal/gen/space/agent/v1"
)

// newTable starts a table in a cgroup of this machine.
func newTable(t *testing.T, limit int) *Table {
	t.Helper()
	root := "/sys/fs/cgroup/unified"
	if _, err := os.Stat(filepath.Join(root, "cgroup.procs")); err != nil {
		root = "/sys/fs/cgroup"
	}
	dir, err := os.MkdirTemp(root, "space-proc-test-")
	if err != nil {
		t.Fatalf("this test makes cgroups and needs root: %v", err)
	}
	t.Cleanup(func() {
		if err := os.Remove(dir); err != nil {
			t.Error(err)
		}
	})
	table, err := New(Config{CgroupRoot: dir, Users: users.New("/", "root"), MaxProcesses: limit})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := table.Close(context.Background()); err != nil {
			t.Error(err)
		}
	})
	if err := table.Thaw(t.Context()); err != nil {
		t.Fatal(err)
	}
	return table
}

func TestLimit(t *testing.T) {
	table := newTable(t, 2)
	spec := &agentv1.ProcessSpec{Argv: [][]byte{[]byte("sleep"), []byte("1000")}}
	for i := range 3 {
		_, err := table.spawn(fmt.Sprint("p", i), spec)
		if (err == nil) != (i < 2) || i == 2 && connect.CodeOf(err) != connect.CodeResourceExhausted {
			t.Errorf("process %d: %v", i, err)
		}
	}
	if table.Running() != 2 {
		t.Errorf("%d run", table.Running())
	}
}

// TestManyShortProcesses starts a thousand from several goroutines, and none may be lost.
func TestManyShortProcesses(t *testing.T) {
	table := newTable(t, 0)
	ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
	defer cancel()
	began := time.Now()
	var wg sync.WaitGroup
	for worker := range 4 {
		wg.Add(1)
		go func() {
			defer wg.Done()
			for i := range 250 {
				id := fmt.Sprintf("p%d-%d", worker, i)
				p, err := table.spawn(id, &agentv1.ProcessSpec{Argv: [][]byte{[]byte("true")}})
				if err != nil {
					t.Error(err)
					return
				}
				var seq uint64
				for end := false; !end && err == nil; {
					var frames []*agentv1.ProcessFrame
					if frames, end, err = p.ring.after(ctx, seq); len(frames) > 0 {
						seq = frames[len(frames)-1].GetSeq()
					}
				}
				if err != nil || seq != 2 {
					t.Errorf("%s: %d frames, %v", id, seq, err)
				}
				table.ack(id, seq)
			}
		}()
	}
	wg.Wait()
	t.Logf("%v", time.Since(began))
	if left := table.list(); len(left) != 0 {
		t.Errorf("left: %v", left)
	}
}
