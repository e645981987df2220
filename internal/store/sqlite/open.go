package sqlite

import (
	"context"
	"database/sql"
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"net/url"
	"os"
	"path/filepath"
	"strings"

	"github.com/pressly/goose/v3"
	_ "modernc.org/sqlite" // the driver "sqlite"
)

//go:embed migrations/*.sql
var migrations embed.FS

// readers bounds the pool of reading connections.
const readers = 8

// DB is a store.Store in one SQLite file. Make one with Open.
type DB struct {
	write *sql.DB // exactly one connection
	read  *sql.DB // query_only
	lock  *os.File
}

// SchemaError says that a newer release wrote the database.
type SchemaError struct {
	Path       string
	Have, Want int64
}

// Error implements error.
func (e *SchemaError) Error() string {
	return fmt.Sprintf("database %s has schema %d, this release knows %d: start the newer release, or restore the backup made before the upgrade",
		e.Path, e.Have, e.Want)
}

// ParseURL returns the absolute path of a sqlite:///abs/path URL.
func ParseURL(raw string) (string, error) {
	u, err := url.Parse(raw)
	if err != nil {
		return "", errors.New("not a URL: want sqlite:///absolute/path")
	}
	switch {
	case u.Scheme != "sqlite":
		return "", fmt.Errorf("unknown scheme %q: want sqlite:///absolute/path", u.Scheme)
	case u.Host != "" || u.User != nil || u.Opaque != "":
		return "", errors.New("a sqlite URL has three slashes: want sqlite:///absolute/path")
	case u.RawQuery != "" || u.ForceQuery || u.Fragment != "":
		return "", errors.New("a sqlite URL takes no options: want sqlite:///absolute/path")
	case !strings.HasPrefix(u.Path, "/") || strings.ContainsRune(u.Path, 0) || strings.HasSuffix(u.Path, "/"):
		return "", errors.New("a sqlite URL names one file: want sqlite:///absolute/path")
	}
	return filepath.Clean(u.Path), nil
}

// Open opens or makes the database at path and brings its schema up to date. Its folder, made if it is missing, is
// locked for this process until Close: a *LockedError names the process that has it.
func Open(ctx context.Context, path string) (*DB, error) {
	path, err := filepath.Abs(path)
	if err != nil {
		return nil, fmt.Errorf("open database: %w", err)
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return nil, fmt.Errorf("open database: %w", err)
	}
	lock, err := lockDir(filepath.Dir(path))
	if err != nil {
		return nil, fmt.Errorf("open database: %w", err)
	}
	db := &DB{lock: lock}
	if err := db.open(ctx, path); err != nil {
		_ = db.Close()
		return nil, fmt.Errorf("open database %s: %w", path, err)
	}
	return db, nil
}

func (db *DB) open(ctx context.Context, path string) error {
	// Made here, so that nobody else can ever read it; the -wal and -shm files take over its mode.
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return err
	}
	if err := f.Close(); err != nil {
		return err
	}
	if db.write, err = sql.Open("sqlite", dsn(path, false)); err != nil {
		return err
	}
	db.write.SetMaxOpenConns(1)
	db.write.SetMaxIdleConns(1)
	if err := migrate(ctx, db.write, path); err != nil {
		return mapError(err)
	}
	if db.read, err = sql.Open("sqlite", dsn(path, true)); err != nil {
		return err
	}
	db.read.SetMaxOpenConns(readers)
	db.read.SetMaxIdleConns(readers)
	return mapError(db.read.PingContext(ctx))
}

// dsn is the driver's name of a connection; the pragmas hold for each connection.
func dsn(path string, readOnly bool) string {
	q := url.Values{"_pragma": {"busy_timeout(5000)", "journal_mode(WAL)", "synchronous(FULL)", "foreign_keys(1)"}}
	if readOnly {
		q.Add("_pragma", "query_only(1)")
	} else {
		q.Set("_txlock", "immediate")
	}
	return (&url.URL{Scheme: "file", Path: path, RawQuery: q.Encode()}).String()
}

func migrate(ctx context.Context, db *sql.DB, path string) error {
	fsys, err := fs.Sub(migrations, "migrations")
	if err != nil {
		return err
	}
	provider, err := goose.NewProvider(goose.DialectSQLite3, db, fsys, goose.WithDisableGlobalRegistry(true))
	if err != nil {
		return fmt.Errorf("migrations: %w", err)
	}
	have, want, err := provider.GetVersions(ctx)
	if err != nil {
		return fmt.Errorf("schema version: %w", err)
	}
	if have > want {
		return &SchemaError{Path: path, Have: have, Want: want}
	}
	if _, err := provider.Up(ctx); err != nil {
		return fmt.Errorf("migrate from schema %d to %d: %w", have, want, err)
	}
	return nil
}

// Close waits for running transactions, closes the database and gives up the lock.
func (db *DB) Close() error {
	var errs []error
	if db.read != nil {
		errs = append(errs, db.read.Close())
	}
	if db.write != nil {
		errs = append(errs, db.write.Close())
	}
	errs = append(errs, unlockDir(db.lock))
	return errors.Join(errs...)
}
