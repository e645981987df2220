package bench

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"strings"
	"time"

	"github.com/space-sandbox/space/internal/client"
)

const (
	bulk    = 64 << 20 // bytes of output and of files
	maxBulk = 5        // samples of what moves that much
)

// Config is what to measure.
type Config struct {
	Armed   *client.Client // a server with a pool
	Unarmed *client.Client // one without; nil: not measured
	N       int            // samples of each figure
	Say     func(string)   // told what is measured now
	PSS     func() []float64
}

// bench is one run.
type bench struct {
	Config
	report Report
	id     string // the sandbox that most figures use
}

// Run measures everything.
func Run(ctx context.Context, cfg Config) (*Report, error) {
	b := &bench{Config: cfg}
	b.report.Machine = machine()
	steps := []struct {
		name string
		fn   func(context.Context) error
	}{{"create, with ready VMs", b.createArmed}, {"create, without", b.createUnarmed}, {"commands", b.withSandbox}}
	for _, s := range steps {
		cfg.Say(s.name)
		if err := s.fn(ctx); err != nil {
			return nil, fmt.Errorf("%s: %w", s.name, err)
		}
	}
	for _, f := range b.report.Figures {
		f.finish()
	}
	return &b.report, nil
}

func machine() map[string]any {
	m := map[string]any{"cpus": runtime.NumCPU(), "os": runtime.GOOS, "arch": runtime.GOARCH}
	if data, err := os.ReadFile("/proc/sys/kernel/osrelease"); err == nil {
		m["kernel"] = strings.TrimSpace(string(data))
	}
	return m
}

func (b *bench) figure(name, unit string) *Figure {
	f := &Figure{Name: name, Unit: unit}
	b.report.Figures = append(b.report.Figures, f)
	return f
}

// create makes a running sandbox.
func create(ctx context.Context, c *client.Client) (string, error) {
	acc, err := c.CreateSandbox(ctx, client.CreateSandbox{Template: "base"})
	if err != nil {
		return "", err
	}
	_, err = c.WaitOperation(ctx, acc.Operation.ID, nil)
	return acc.Sandbox.ID, err
}

// command runs a command and returns the bytes that it wrote.
func command(ctx context.Context, c *client.Client, id string, argv ...string) (int, error) {
	cmd, err := c.CreateCommand(ctx, id, client.CreateCommand{Argv: argv})
	if err != nil {
		return 0, err
	}
	total := 0
	exit, err := c.Events(ctx, cmd.Session, func(ev *client.Event) error {
		if ev.Kind == client.EventStdout {
			total += len(ev.Data)
		}
		return nil
	})
	if err == nil && (exit.Code == nil || *exit.Code != 0) {
		err = fmt.Errorf("%q failed", argv[0])
	}
	return total, err
}

// creates measures create and first command on one server.
func (b *bench) creates(ctx context.Context, c *client.Client, kind string) error {
	running, first := b.figure("create to running ("+kind+")", "ms"), b.figure("create to first command done ("+kind+")", "ms")
	for range b.N {
		begin := time.Now()
		id, err := create(ctx, c)
		if err == nil {
			running.addMS(time.Since(begin))
			if _, err = command(ctx, c, id, "/bin/true"); err == nil {
				first.addMS(time.Since(begin))
			}
		}
		if id != "" {
			_, derr := c.DeleteSandbox(context.WithoutCancel(ctx), id, 60)
			err = errors.Join(err, derr)
		}
		if err != nil {
			return err
		}
		if err := settle(ctx); err != nil {
			return err
		}
	}
	return nil
}

// settle leaves the server the time to fill its pool again, which is not what is measured.
func settle(ctx context.Context) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(700 * time.Millisecond):
		return nil
	}
}

func (b *bench) createArmed(ctx context.Context) error { return b.creates(ctx, b.Armed, "armed") }

func (b *bench) createUnarmed(ctx context.Context) error {
	if b.Unarmed == nil {
		return nil
	}
	return b.creates(ctx, b.Unarmed, "unarmed")
}

// withSandbox measures what happens inside of one sandbox.
func (b *bench) withSandbox(ctx context.Context) (err error) {
	b.id, err = create(ctx, b.Armed)
	if b.id != "" {
		defer func() {
			_, derr := b.Armed.DeleteSandbox(context.WithoutCancel(ctx), b.id, 60)
			err = errors.Join(err, derr)
		}()
	}
	if err != nil {
		return err
	}
	bulkN := min(b.N, maxBulk)
	for _, m := range []struct {
		name string
		n    int
		fn   func(context.Context) error
	}{
		{"exec round trip (/bin/true)", b.N, b.exec},
		{"64 MiB of stdout", bulkN, b.stdout},
		{"64 MiB file up", bulkN, b.up},
		{"64 MiB file down", bulkN, b.down},
		{"1,000 x 4 KiB files created in the guest", bulkN, b.smallFiles},
		{"API read", b.N, b.read},
	} {
		b.Say(m.name)
		f := b.figure(m.name, "ms")
		for range m.n {
			begin := time.Now()
			if err := m.fn(ctx); err != nil {
				return fmt.Errorf("%s: %w", m.name, err)
			}
			f.addMS(time.Since(begin))
		}
	}
	b.memory()
	return b.readRate(ctx)
}

func (b *bench) exec(ctx context.Context) error {
	_, err := command(ctx, b.Armed, b.id, "/bin/true")
	return err
}

func (b *bench) stdout(ctx context.Context) error {
	n, err := command(ctx, b.Armed, b.id, "head", "-c", fmt.Sprint(bulk), "/dev/zero")
	if err == nil && n != bulk {
		err = fmt.Errorf("%d of %d bytes arrived", n, bulk)
	}
	return err
}

const bulkFile = "/home/user/bench"

func (b *bench) up(ctx context.Context) error {
	_, err := b.Armed.WriteFile(ctx, b.id, bulkFile, "", bulk, bytes.NewReader(make([]byte, bulk)))
	return err
}

func (b *bench) down(ctx context.Context) error {
	r, err := b.Armed.ReadFile(ctx, b.id, bulkFile)
	if err != nil {
		return err
	}
	defer r.Close()
	n, err := io.Copy(io.Discard, r)
	if err == nil && n != bulk {
		err = fmt.Errorf("%d of %d bytes arrived", n, bulk)
	}
	return err
}

func (b *bench) smallFiles(ctx context.Context) error {
	const program = "import os,shutil\nos.makedirs('b',exist_ok=True)\nfor i in range(1000): open(f'b/{i}','wb').write(b'x'*4096)\nshutil.rmtree('b')"
	_, err := command(ctx, b.Armed, b.id, "python3", "-c", program)
	return err
}

func (b *bench) read(ctx context.Context) error {
	_, err := b.Armed.Sandbox(ctx, b.id)
	return err
}

// readRate measures how many reads per second four clients get.
func (b *bench) readRate(ctx context.Context) error {
	const clients, window = 4, time.Second
	f := b.figure("API reads per second, 4 clients", "1/s")
	for range min(b.N, 3) {
		counts, errs := make(chan int, clients), make(chan error, clients)
		end := time.Now().Add(window)
		for range clients {
			go func() { // ends with the window
				n, err := 0, error(nil)
				for time.Now().Before(end) && err == nil {
					err = b.read(ctx)
					n++
				}
				counts <- n
				errs <- err
			}()
		}
		total := 0
		for range clients {
			total += <-counts
			if err := <-errs; err != nil {
				return err
			}
		}
		f.add(float64(total) / window.Seconds())
	}
	return nil
}

// memory measures what an idle sandbox costs, if the caller can read it.
func (b *bench) memory() {
	if b.PSS == nil {
		return
	}
	if all := b.PSS(); len(all) > 0 {
		f := b.figure("idle PSS of one sandbox (shim and VMM)", "MiB")
		f.samples = all
	}
}
