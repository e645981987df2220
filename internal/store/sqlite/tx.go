package sqlite

import (
	"context"
	"database/sql"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	sqlite "modernc.org/sqlite"
	lib "modernc.org/sqlite/lib"

	"github.com/space-sandbox/space/internal/store"
)

var (
	_ store.Store = (*DB)(nil)
	_ store.Tx    = tx{}
)

// tx is a store.Tx over one SQL transaction.
type tx struct{ sql *sql.Tx }

// Update implements store.Store.
func (db *DB) Update(ctx context.Context, fn func(store.Tx) error) error {
	return run(ctx, db.write, nil, fn)
}

// View implements store.Store.
func (db *DB) View(ctx context.Context, fn func(store.Tx) error) error {
	return run(ctx, db.read, &sql.TxOptions{ReadOnly: true}, fn)
}

func run(ctx context.Context, db *sql.DB, opts *sql.TxOptions, fn func(store.Tx) error) error {
	t, err := db.BeginTx(ctx, opts)
	if err != nil {
		return fmt.Errorf("begin: %w", mapError(err))
	}
	defer func() { _ = t.Rollback() }() // nothing to do after a commit
	if err := fn(tx{t}); err != nil {
		return err
	}
	if err := t.Commit(); err != nil {
		if ctx.Err() != nil {
			err = ctx.Err() // rather than "transaction has already been rolled back"
		}
		return fmt.Errorf("commit: %w", mapError(err))
	}
	return nil
}

// mapError gives an error of the driver its place in the contract. Everything it does not know stays as it is.
func mapError(err error) error {
	if err == nil {
		return nil
	}
	var e *sqlite.Error
	switch {
	case errors.Is(err, sql.ErrNoRows):
		return store.ErrNotFound
	case errors.Is(err, context.DeadlineExceeded):
		return fmt.Errorf("%w: %w", store.ErrUnavailable, err)
	case errors.Is(err, sql.ErrConnDone):
		return fmt.Errorf("%w: %w", store.ErrUnavailable, err)
	case !errors.As(err, &e):
		return err
	}
	switch e.Code() {
	case lib.SQLITE_CONSTRAINT_PRIMARYKEY, lib.SQLITE_CONSTRAINT_UNIQUE:
		return fmt.Errorf("%w: %w", store.ErrExists, err)
	case lib.SQLITE_CONSTRAINT_FOREIGNKEY:
		return fmt.Errorf("%w: %w", store.ErrNotFound, err)
	}
	switch e.Code() & 0xff { // the low byte is the class
	case lib.SQLITE_FULL, lib.SQLITE_BUSY, lib.SQLITE_LOCKED, lib.SQLITE_IOERR, lib.SQLITE_CANTOPEN,
		lib.SQLITE_READONLY, lib.SQLITE_NOMEM, lib.SQLITE_CORRUPT, lib.SQLITE_PROTOCOL:
		return fmt.Errorf("%w: %w", store.ErrUnavailable, err)
	}
	return err
}

// exec runs a statement and returns how many rows it touched.
func (t tx) exec(ctx context.Context, query string, args ...any) (int, error) {
	res, err := t.sql.ExecContext(ctx, query, args...)
	if err != nil {
		return 0, mapError(err)
	}
	n, err := res.RowsAffected()
	return int(n), mapError(err)
}

// execOne runs a statement that must touch a row; none is otherwise.
func (t tx) execOne(ctx context.Context, none error, query string, args ...any) error {
	n, err := t.exec(ctx, query, args...)
	if err == nil && n == 0 {
		return none
	}
	return err
}

func (t tx) row(ctx context.Context, query string, args []any, into ...any) error {
	return mapError(t.sql.QueryRowContext(ctx, query, args...).Scan(into...))
}

// collect runs a query and scans each row.
func collect[T any](ctx context.Context, t tx, scan func(func(...any) error) (T, error), query string, args ...any) (_ []T, err error) {
	rows, err := t.sql.QueryContext(ctx, query, args...)
	if err != nil {
		return nil, mapError(err)
	}
	defer func() { err = errors.Join(err, mapError(rows.Close())) }()
	var out []T
	for rows.Next() {
		v, err := scan(rows.Scan)
		if err != nil {
			return nil, mapError(err)
		}
		out = append(out, v)
	}
	return out, mapError(rows.Err())
}

func toNano(t time.Time) int64 {
	if t.IsZero() {
		return 0
	}
	return t.UnixNano()
}

func fromNano(n int64) time.Time {
	if n == 0 {
		return time.Time{}
	}
	return time.Unix(0, n).UTC()
}

func hexHash(h [32]byte) string { return hex.EncodeToString(h[:]) }

func parseHash(s string) (h [32]byte, err error) {
	b, err := hex.DecodeString(s)
	if err != nil || len(b) != len(h) {
		return h, errors.New("stored hash is damaged")
	}
	return [32]byte(b), nil
}

// encode makes the doc column of a record. Times keep their nanoseconds and lose their monotonic reading.
func encode(v any) (string, error) {
	b, err := json.Marshal(v)
	if err != nil {
		return "", fmt.Errorf("encode record: %w", err)
	}
	return string(b), nil
}

func decode[T any](doc string) (*T, error) {
	v := new(T)
	if err := json.Unmarshal([]byte(doc), v); err != nil {
		return nil, fmt.Errorf("stored record is damaged: %w", err)
	}
	return v, nil
}
