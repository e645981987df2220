package sqlite

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/space-sandbox/space/internal/sandbox"
	"github.com/space-sandbox/space/internal/store"
)

func newSandbox() *sandbox.Sandbox {
	return &sandbox.Sandbox{ID: sandbox.NewID(), ProjectID: "default", State: sandbox.StateRunning, CreatedAt: time.Unix(1, 0)}
}

func put(ctx context.Context, t *testing.T, db *DB, name, value string) {
	t.Helper()
	if err := db.Update(ctx, func(tx store.Tx) error { return tx.PutSetting(ctx, name, value) }); err != nil {
		t.Fatal(err)
	}
}

func setting(ctx context.Context, db *DB, name string) (value string, err error) {
	err = db.View(ctx, func(tx store.Tx) error {
		value, err = tx.Setting(ctx, name)
		return err
	})
	return value, err
}

// powerCut copies the files of a database as they lie on the disk, as a crash at this moment would leave them. The
// shared-memory index is left out: it does not survive a crash.
func powerCut(t *testing.T, path string) string {
	t.Helper()
	to := filepath.Join(t.TempDir(), "space.db")
	for _, suffix := range []string{"", "-wal"} {
		data, err := os.ReadFile(path + suffix)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(to+suffix, data, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return to
}

func sound(t *testing.T, db *DB) {
	t.Helper()
	var verdict string
	if err := db.read.QueryRowContext(t.Context(), "PRAGMA integrity_check").Scan(&verdict); err != nil || verdict != "ok" {
		t.Errorf("integrity: %q, %v", verdict, err)
	}
	rows, err := db.read.QueryContext(t.Context(), "PRAGMA foreign_key_check")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = rows.Close() }()
	if rows.Next() {
		t.Error("a row refers to nothing")
	}
	if err := rows.Err(); err != nil {
		t.Error(err)
	}
}

// TestCrashInATransactionLosesExactlyThatTransaction takes the files while a transaction is half written, big enough to
// have been spilled to the WAL.
func TestCrashInATransactionLosesExactlyThatTransaction(t *testing.T) {
	ctx, path := t.Context(), tempDB(t)
	db := open(t, path)
	if _, err := db.write.ExecContext(ctx, "PRAGMA cache_size = 5"); err != nil { // pages, so that the cache spills
		t.Fatal(err)
	}
	kept := newSandbox()
	if err := db.Update(ctx, func(tx store.Tx) error { return tx.InsertSandbox(ctx, kept) }); err != nil {
		t.Fatal(err)
	}
	put(ctx, t, db, "state", "before")
	before, err := os.Stat(path + "-wal")
	if err != nil {
		t.Fatal(err)
	}
	var copied string
	stop := errors.New("stop")
	err = db.Update(ctx, func(tx store.Tx) error {
		if err := tx.PutSetting(ctx, "state", "half"); err != nil {
			return err
		}
		for i := range 200 {
			s := newSandbox()
			s.Env = map[string]string{"big": string(make([]byte, 4000)) + strconv.Itoa(i)}
			if err := tx.InsertSandbox(ctx, s); err != nil {
				return err
			}
		}
		copied = powerCut(t, path)
		return stop
	})
	if !errors.Is(err, stop) {
		t.Fatal(err)
	}
	if after, err := os.Stat(copied + "-wal"); err != nil || after.Size() <= before.Size() {
		t.Fatalf("nothing of the transaction was on the disk (%d bytes before, %v): the test tests nothing", before.Size(), err)
	}
	for _, p := range []string{copied, path} { // after the crash, and after the rollback
		got := db
		if p == copied {
			got = open(t, p)
		}
		sound(t, got)
		if v, err := setting(ctx, got, "state"); v != "before" || err != nil {
			t.Errorf("%s: state %q, %v", p, v, err)
		}
		if err := got.View(ctx, func(tx store.Tx) error {
			list, err := tx.ListSandboxes(ctx, store.SandboxQuery{})
			if len(list) != 1 || list[0].ID != kept.ID {
				t.Errorf("%s: %d sandboxes", p, len(list))
			}
			return err
		}); err != nil {
			t.Error(err)
		}
		put(ctx, t, got, "state", "after") // it can be written again
	}
}

// TestCrashAfterACommitKeepsIt: what Update answered for is on the disk, without a checkpoint or a close.
func TestCrashAfterACommitKeepsIt(t *testing.T) {
	ctx, path := t.Context(), tempDB(t)
	db := open(t, path)
	for i := range 20 {
		s := newSandbox()
		if err := db.Update(ctx, func(tx store.Tx) error {
			if err := tx.InsertSandbox(ctx, s); err != nil {
				return err
			}
			return tx.PutSetting(ctx, "last", string(s.ID))
		}); err != nil {
			t.Fatal(err)
		}
		if i%5 != 4 {
			continue
		}
		after := open(t, powerCut(t, path))
		sound(t, after)
		if v, err := setting(ctx, after, "last"); v != string(s.ID) || err != nil {
			t.Fatalf("after %d: last %q, %v", i+1, v, err)
		}
	}
}

// TestTornWALKeepsWhatWasWhole cuts and damages the end of the WAL, as a crash within a write leaves it: the database
// opens, is sound, and holds a prefix of the transactions.
func TestTornWALKeepsWhatWasWhole(t *testing.T) {
	ctx, path := t.Context(), tempDB(t)
	db := open(t, path)
	if _, err := db.write.ExecContext(ctx, "PRAGMA wal_checkpoint(TRUNCATE)"); err != nil {
		t.Fatal(err)
	}
	put(ctx, t, db, "a", "1")
	first, err := os.Stat(path + "-wal")
	if err != nil {
		t.Fatal(err)
	}
	put(ctx, t, db, "a", "2")
	whole, err := os.Stat(path + "-wal")
	if err != nil || whole.Size() <= first.Size() {
		t.Fatalf("%v: the second write is not behind the first", err)
	}
	for name, damage := range map[string]func(*os.File) error{
		"cut within the last frame": func(f *os.File) error { return f.Truncate(whole.Size() - 100) },
		"cut after the first write": func(f *os.File) error { return f.Truncate(first.Size()) },
		"last bytes never written": func(f *os.File) error {
			_, err := f.WriteAt(make([]byte, 512), whole.Size()-512)
			if err == nil {
				_, err = f.WriteAt([]byte("garbage"), whole.Size()-300)
			}
			return err
		},
		"a frame of nothing behind": func(f *os.File) error {
			_, err := f.WriteAt(make([]byte, 4120), whole.Size())
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			copied := powerCut(t, path)
			f, err := os.OpenFile(copied+"-wal", os.O_RDWR, 0)
			if err != nil {
				t.Fatal(err)
			}
			if err := errors.Join(damage(f), f.Close()); err != nil {
				t.Fatal(err)
			}
			after := open(t, copied)
			sound(t, after)
			want := "1"
			if name == "a frame of nothing behind" {
				want = "2"
			}
			if v, err := setting(ctx, after, "a"); v != want || err != nil {
				t.Errorf("a = %q, %v; want %s", v, err, want)
			}
		})
	}
}

// TestMigrationsAreIdempotent: opening again changes nothing of the schema and records no version twice.
func TestMigrationsAreIdempotent(t *testing.T) {
	ctx, path := t.Context(), tempDB(t)
	dump := func(db *DB) (schema string, versions int) {
		rows, err := db.read.QueryContext(ctx, "SELECT type, name, tbl_name, coalesce(sql, '') FROM sqlite_master ORDER BY 1, 2")
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = rows.Close() }()
		for rows.Next() {
			var a, b, c, d string
			if err := rows.Scan(&a, &b, &c, &d); err != nil {
				t.Fatal(err)
			}
			schema += fmt.Sprintln(a, b, c, d)
		}
		if err := errors.Join(rows.Err(), db.read.QueryRowContext(ctx, "SELECT count(*) FROM goose_db_version").Scan(&versions)); err != nil {
			t.Fatal(err)
		}
		return schema, versions
	}
	db := open(t, path)
	schema, versions := dump(db)
	put(ctx, t, db, "a", "b")
	for range 3 {
		if err := db.Close(); err != nil {
			t.Fatal(err)
		}
		db = open(t, path)
		if s, v := dump(db); s != schema || v != versions {
			t.Errorf("opening again changes the schema: %d versions, were %d\n%s", v, versions, s)
		}
		if v, err := setting(ctx, db, "a"); v != "b" || err != nil {
			t.Errorf("a = %q, %v", v, err)
		}
	}
	for _, table := range []string{"sandboxes", "sandbox_metadata", "operations", "sessions"} {
		var n int
		if err := db.read.QueryRowContext(ctx, "SELECT count(*) FROM "+table).Scan(&n); err != nil || n != 0 {
			t.Errorf("%s: %d rows, %v", table, n, err)
		}
	}
}

// TestCrashBeforeTheFirstMigration: a process that died right after it made the file leaves it empty.
func TestCrashBeforeTheFirstMigration(t *testing.T) {
	path := tempDB(t)
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	db := open(t, path)
	put(t.Context(), t, db, "a", "b")
	sound(t, db)
}

// TestConcurrentWritersLoseNothing lets writers and readers meet: every change happens once, and every reader sees a
// state that some writer left.
func TestConcurrentWritersLoseNothing(t *testing.T) {
	ctx := t.Context()
	db := open(t, tempDB(t))
	put(ctx, t, db, "a", "0")
	put(ctx, t, db, "b", "0")
	const writers, rounds = 8, 15
	var wg sync.WaitGroup
	for range writers {
		wg.Go(func() {
			for range rounds {
				if err := db.Update(ctx, func(tx store.Tx) error { return increase(ctx, tx) }); err != nil {
					t.Errorf("write: %v", err)
				}
			}
		})
	}
	for range 4 {
		wg.Go(func() {
			last := 0
			for last < writers*rounds && !t.Failed() {
				err := db.View(ctx, func(tx store.Tx) error {
					a, err := number(ctx, tx, "a")
					if err != nil {
						return err
					}
					b, err := number(ctx, tx, "b")
					if a != b || a < last {
						t.Errorf("read %d and %d after %d", a, b, last)
					}
					last = a
					return err
				})
				if err != nil {
					t.Errorf("read: %v", err)
				}
			}
		})
	}
	wg.Wait()
	if v, err := setting(ctx, db, "a"); v != strconv.Itoa(writers*rounds) || err != nil {
		t.Errorf("a = %s, %v; want %d", v, err, writers*rounds)
	}
}

func number(ctx context.Context, tx store.Tx, name string) (int, error) {
	v, err := tx.Setting(ctx, name)
	if err != nil {
		return 0, err
	}
	return strconv.Atoi(v)
}

func increase(ctx context.Context, tx store.Tx) error {
	for _, name := range []string{"a", "b"} {
		n, err := number(ctx, tx, name)
		if err != nil {
			return err
		}
		if err := tx.PutSetting(ctx, name, strconv.Itoa(n+1)); err != nil {
			return err
		}
	}
	return nil
}

// TestOneOfManyUpdatesOfAVersionWins: writers that read the same version may not overwrite each other.
func TestOneOfManyUpdatesOfAVersionWins(t *testing.T) {
	ctx := t.Context()
	db := open(t, tempDB(t))
	s := newSandbox()
	if err := db.Update(ctx, func(tx store.Tx) error { return tx.InsertSandbox(ctx, s) }); err != nil {
		t.Fatal(err)
	}
	const writers = 12
	errs := make(chan error, writers)
	for i := range writers {
		mine := *s
		mine.Metadata = map[string]string{"writer": strconv.Itoa(i)}
		go func() {
			errs <- db.Update(ctx, func(tx store.Tx) error { return tx.UpdateSandbox(ctx, &mine) })
		}()
	}
	won := 0
	for range writers {
		switch err := <-errs; {
		case err == nil:
			won++
		case !errors.Is(err, store.ErrVersion):
			t.Errorf("a loser gets %v", err)
		}
	}
	if won != 1 {
		t.Errorf("%d writers won", won)
	}
}

// TestOneOfManyInsertsOfAKeyWins is what idempotency rests on.
func TestOneOfManyInsertsOfAKeyWins(t *testing.T) {
	ctx := t.Context()
	db := open(t, tempDB(t))
	now := time.Unix(1000, 0)
	const writers = 12
	errs := make(chan error, writers)
	for i := range writers {
		e := &store.Idempotency{Scope: "s", Key: "k", Resource: strconv.Itoa(i), CreatedAt: now, ExpiresAt: now.Add(time.Hour)}
		go func() { errs <- db.Update(ctx, func(tx store.Tx) error { return tx.InsertIdempotency(ctx, e) }) }()
	}
	won := 0
	for range writers {
		switch err := <-errs; {
		case err == nil:
			won++
		case !errors.Is(err, store.ErrExists):
			t.Errorf("a loser gets %v", err)
		}
	}
	if won != 1 {
		t.Errorf("%d writers won", won)
	}
}

// TestWaitingWriterGivesUpWithItsContext: one writer holds the only connection; another one's context ends.
func TestWaitingWriterGivesUpWithItsContext(t *testing.T) {
	db := open(t, tempDB(t))
	inside, leave, done := make(chan struct{}), make(chan struct{}), make(chan error, 1)
	go func() {
		done <- db.Update(context.Background(), func(tx store.Tx) error {
			close(inside)
			<-leave
			return tx.PutSetting(context.Background(), "first", "x")
		})
	}()
	<-inside
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	ran := false
	if err := db.Update(ctx, func(store.Tx) error { ran = true; return nil }); !errors.Is(err, context.Canceled) || ran {
		t.Errorf("%v, ran %v", err, ran)
	}
	if _, err := setting(t.Context(), db, "first"); !errors.Is(err, store.ErrNotFound) { // readers are not held up
		t.Errorf("read beside a writer: %v", err)
	}
	close(leave)
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	if v, err := setting(t.Context(), db, "first"); v != "x" || err != nil {
		t.Errorf("%q, %v", v, err)
	}
}

func TestFailedFunctionRollsBack(t *testing.T) {
	ctx := t.Context()
	db := open(t, tempDB(t))
	want := errors.New("mine")
	err := db.Update(ctx, func(tx store.Tx) error {
		if err := tx.PutSetting(ctx, "a", "b"); err != nil {
			return err
		}
		return want
	})
	if !errors.Is(err, want) {
		t.Errorf("%v", err)
	}
	func() {
		defer func() { _ = recover() }()
		_ = db.Update(ctx, func(tx store.Tx) error {
			_ = tx.PutSetting(ctx, "a", "c")
			panic("in the middle")
		})
	}()
	if v, err := setting(ctx, db, "a"); !errors.Is(err, store.ErrNotFound) {
		t.Errorf("a = %q, %v", v, err)
	}
	put(ctx, t, db, "a", "d") // the one connection came back, after a panic too
}

func TestViewCannotWrite(t *testing.T) {
	ctx := t.Context()
	db := open(t, tempDB(t))
	if err := db.View(ctx, func(tx store.Tx) error { return tx.PutSetting(ctx, "a", "b") }); err == nil {
		t.Error("a view wrote")
	}
	if _, err := setting(ctx, db, "a"); !errors.Is(err, store.ErrNotFound) {
		t.Errorf("%v", err)
	}
}

func TestErrorsAreMapped(t *testing.T) {
	foreign := errors.New("foreign")
	for _, c := range []struct{ err, want error }{
		{sql.ErrNoRows, store.ErrNotFound},
		{fmt.Errorf("scan: %w", sql.ErrNoRows), store.ErrNotFound},
		{context.DeadlineExceeded, store.ErrUnavailable},
		{sql.ErrConnDone, store.ErrUnavailable},
		{foreign, foreign},
		{io.ErrUnexpectedEOF, io.ErrUnexpectedEOF},
		{context.Canceled, context.Canceled},
	} {
		if got := mapError(c.err); !errors.Is(got, c.want) {
			t.Errorf("%v becomes %v", c.err, got)
		}
	}
	if mapError(nil) != nil {
		t.Error("no error becomes one")
	}
	for _, err := range []error{foreign, context.Canceled} { // neither is a reason to try again
		if errors.Is(mapError(err), store.ErrUnavailable) {
			t.Errorf("%v is taken for an outage", err)
		}
	}
}

func TestParseURLRefusesWhatCouldReachElsewhere(t *testing.T) {
	for _, raw := range []string{
		"", "/var/lib/space.db", "file:///x.db", "SQLITE3:///x.db", "sqlite:////", "sqlite:///", "sqlite://localhost/x.db", "sqlite://u:p@/x.db", "sqlite://u@/x",
		"sqlite:///x.db?", "sqlite:///x.db?_pragma=journal_mode(OFF)", "sqlite:///x%zz", "sqlite:///x\x00", "sqlite:/%00", "sqlite:///a/%2e%2e%00",
	} {
		path, err := ParseURL(raw)
		if err == nil {
			t.Errorf("%q is taken for %q", raw, path)
		}
	}
	for raw, want := range map[string]string{"sqlite:///a%3Fb%23c": "/a?b#c", "sqlite:///%C3%A9.db": "/é.db", "sqlite:///a//b/./c": "/a/b/c", "SQLite:///x.db": "/x.db"} {
		if got, err := ParseURL(raw); got != want || err != nil {
			t.Errorf("%q: %q, %v; want %q", raw, got, err, want)
		}
	}
}
