package sqlite

import (
	"bufio"
	"context"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/space-sandbox/space/internal/sandbox"
	"github.com/space-sandbox/space/internal/store"
	"github.com/space-sandbox/space/internal/store/storetest"
)

func open(t *testing.T, path string) *DB {
	t.Helper()
	db, err := Open(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = db.Close() })
	return db
}

func tempDB(t *testing.T) string { return filepath.Join(t.TempDir(), "odd name?#%41.db") }

func TestContract(t *testing.T) {
	storetest.Run(t, func(t *testing.T) store.Store { return open(t, tempDB(t)) })
}

func TestParseURL(t *testing.T) {
	for raw, want := range map[string]string{
		"sqlite:///var/lib/space/space.db": "/var/lib/space/space.db",
		"sqlite:///a/../b/space%20x.db":    "/b/space x.db",
		"sqlite://relative/x.db":           "",
		"sqlite:x.db":                      "",
		"sqlite:///x.db?mode=ro":           "",
		"sqlite:///x.db#a":                 "",
		"sqlite:///dir/":                   "",
		"sqlite://":                        "",
		"sqlite:///a%00b":                  "",
		"postgres:///x":                    "",
		"://":                              "",
	} {
		got, err := ParseURL(raw)
		if got != want || (err == nil) != (want != "") {
			t.Errorf("ParseURL(%q) = %q, %v; want %q", raw, got, err, want)
		}
	}
}

func TestReopenKeepsEverythingPrivately(t *testing.T) {
	path := filepath.Join(t.TempDir(), "new", "space.db")
	db := open(t, path)
	if err := db.Update(t.Context(), func(tx store.Tx) error { return tx.PutSetting(t.Context(), "a", "b") }); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{path, path + "-wal", filepath.Join(filepath.Dir(path), "lock")} {
		info, err := os.Stat(name)
		if err != nil || info.Mode().Perm() != 0o600 {
			t.Errorf("%s: %v, %v", name, info, err)
		}
	}
	if err := db.Close(); err != nil {
		t.Fatal(err)
	}
	err := open(t, path).View(t.Context(), func(tx store.Tx) error {
		_, err := tx.Setting(t.Context(), "a")
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}

func TestPragmas(t *testing.T) {
	db := open(t, tempDB(t))
	for pragma, want := range map[string]string{
		"journal_mode": "wal", "synchronous": "2", "foreign_keys": "1", "busy_timeout": "5000",
	} {
		var got string
		if err := db.write.QueryRowContext(t.Context(), "PRAGMA "+pragma).Scan(&got); err != nil || got != want {
			t.Errorf("%s = %q, %v; want %q", pragma, got, err, want)
		}
	}
}

func TestLockIsExclusiveAndNamesItsHolder(t *testing.T) {
	path := tempDB(t)
	db := open(t, path)
	_, err := Open(t.Context(), path)
	var locked *LockedError
	if !errors.As(err, &locked) || locked.PID != os.Getpid() || locked.Dir != filepath.Dir(path) {
		t.Fatalf("second open = %v", err)
	}
	if !strings.Contains(err.Error(), strconv.Itoa(os.Getpid())) {
		t.Errorf("the error does not name the process: %v", err)
	}
	if err := db.Close(); err != nil {
		t.Fatal(err)
	}
	open(t, path)
}

// TestLockEndsWithItsProcess kills a process that holds the lock: the next one gets it at once.
func TestLockEndsWithItsProcess(t *testing.T) {
	const env = "SQLITE_TEST_HOLD"
	if path := os.Getenv(env); path != "" {
		db := open(t, path)
		_, _ = os.Stdout.WriteString("held\n")
		_, _ = io.Copy(io.Discard, os.Stdin) // until the parent kills us or goes
		_ = db.Close()
		return
	}
	path := tempDB(t)
	cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestLockEndsWithItsProcess$")
	cmd.Env = append(os.Environ(), env+"="+path)
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	defer stdin.Close()
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if line, err := bufio.NewReader(stdout).ReadString('\n'); line != "held\n" {
		t.Fatalf("child said %q, %v", line, err)
	}
	var locked *LockedError
	if _, err := Open(t.Context(), path); !errors.As(err, &locked) || locked.PID != cmd.Process.Pid {
		t.Fatalf("open beside the child = %v, want a lock of %d", err, cmd.Process.Pid)
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait()
	open(t, path)
}

func TestDamagedLockFileIsStillALock(t *testing.T) {
	path := tempDB(t)
	open(t, path)
	lock := filepath.Join(filepath.Dir(path), "lock")
	for _, content := range []string{"", "x", "-4", strings.Repeat("9", 100)} {
		if err := os.WriteFile(lock, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		var locked *LockedError
		if _, err := Open(t.Context(), path); !errors.As(err, &locked) || locked.PID != 0 {
			t.Errorf("with %q: %v", content, err)
		}
	}
}

func TestNewerSchemaIsRefused(t *testing.T) {
	path := tempDB(t)
	db := open(t, path)
	if _, err := db.write.ExecContext(t.Context(), `INSERT INTO goose_db_version (version_id, is_applied) VALUES (99999, 1)`); err != nil {
		t.Fatal(err)
	}
	if err := db.Close(); err != nil {
		t.Fatal(err)
	}
	_, err := Open(t.Context(), path)
	var schema *SchemaError
	if !errors.As(err, &schema) || schema.Have != 99999 || schema.Want >= schema.Have {
		t.Fatalf("open = %v, want a SchemaError", err)
	}
	// The refused open must not keep the lock.
	if _, err := Open(t.Context(), path); !errors.As(err, &schema) {
		t.Fatalf("second open = %v", err)
	}
}

func TestNotADatabaseIsRefused(t *testing.T) {
	path := tempDB(t)
	if err := os.WriteFile(path, []byte(strings.Repeat("not a database ", 100)), 0o600); err != nil {
		t.Fatal(err)
	}
	if db, err := Open(t.Context(), path); err == nil {
		_ = db.Close()
		t.Fatal("opened a text file")
	}
}

func TestFullDiskIsUnavailableAndLeavesNothing(t *testing.T) {
	db := open(t, tempDB(t))
	ctx := t.Context()
	// The writing connection is the only one, so the limit holds for every later write.
	if _, err := db.write.ExecContext(ctx, "PRAGMA max_page_count = 40"); err != nil {
		t.Fatal(err)
	}
	insert := func() error {
		return db.Update(ctx, func(tx store.Tx) error {
			s := &sandbox.Sandbox{ID: sandbox.NewID(), State: sandbox.StateRunning, CreatedAt: time.Now(),
				Env: map[string]string{"big": strings.Repeat("x", 8000)}}
			if err := tx.InsertSandbox(ctx, s); err != nil {
				return err
			}
			return tx.PutSetting(ctx, "last", string(s.ID))
		})
	}
	n := 0
	for ; n < 100; n++ {
		if err := insert(); err != nil {
			if !errors.Is(err, store.ErrUnavailable) {
				t.Fatalf("full disk = %v, want unavailable", err)
			}
			break
		}
	}
	if n == 0 || n == 100 {
		t.Fatalf("the disk was full after %d sandboxes", n)
	}
	if err := db.View(ctx, func(tx store.Tx) error {
		list, err := tx.ListSandboxes(ctx, store.SandboxQuery{})
		if err != nil {
			return err
		}
		last, err := tx.Setting(ctx, "last")
		if len(list) != n || string(list[n-1].ID) != last {
			t.Errorf("%d sandboxes, last %s; want %d", len(list), last, n)
		}
		return err
	}); err != nil {
		t.Fatal(err)
	}
	if _, err := db.write.ExecContext(ctx, "PRAGMA max_page_count = 10000"); err != nil {
		t.Fatal(err)
	}
	if err := insert(); err != nil {
		t.Fatalf("after room was made: %v", err)
	}
}

func TestClosedStoreFails(t *testing.T) {
	db := open(t, tempDB(t))
	if err := db.Close(); err != nil {
		t.Fatal(err)
	}
	for name, fn := range map[string]func(context.Context, func(store.Tx) error) error{"update": db.Update, "view": db.View} {
		if err := fn(t.Context(), func(store.Tx) error { return nil }); err == nil {
			t.Errorf("%s of a closed store worked", name)
		}
	}
}

func FuzzParseURL(f *testing.F) {
	for _, s := range []string{"sqlite:///a", "sqlite:///a/../../b", "sqlite://h/a", "sqlite:///%2e%2e/x", ""} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, raw string) {
		path, err := ParseURL(raw)
		if err == nil && (!filepath.IsAbs(path) || filepath.Clean(path) != path || strings.ContainsRune(path, 0)) {
			t.Fatalf("ParseURL(%q) = %q", raw, path)
		}
	})
}
