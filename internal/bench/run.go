package bench

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"strings"
	"time"

	"github.com/space-sandbox/space/internal/bench/floor"
	"github.com/space-sandbox/space/internal/client"
)

// Config is what to measure.
type Config struct {
	Armed   *client.Client // a server with a pool
	Unarmed *client.Client // one without; nil: not measured
	N       int            // samples of each figure
	Say     func(string)   // told what is measured now
	Floor   *floor.Floor   // nil: no floors
	// UnarmedDir is the data folder of Unarmed, whose sandboxes' memory is measured; "" if this machine does not have it.
	UnarmedDir string
	// Settle waits until the servers have nothing to do, such as filling their pools; nil: a while.
	Settle func(context.Context) error
}

// bench is one run.
type bench struct {
	Config
	report Report
	id     string    // the sandbox that most figures use
	raw    *floor.VM // and the VM that their floors use, or nil
}

// Run measures everything.
func Run(ctx context.Context, cfg Config) (*Report, error) {
	b := &bench{Config: cfg}
	b.report.Machine = machine()
	if b.Settle == nil {
		b.Settle = settle
	}
	for _, s := range []struct {
		name string
		fn   func(context.Context) error
	}{
		{"create, with ready VMs", b.createArmed},
		{"create, without", b.createUnarmed},
		{"commands and files", b.withSandbox},
		{"memory", b.memory},
	} {
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

// machine describes what was measured on, with the load it had before.
func machine() map[string]any {
	m := map[string]any{"cpus": runtime.NumCPU(), "os": runtime.GOOS, "arch": runtime.GOARCH}
	for key, path := range map[string]string{"kernel": "/proc/sys/kernel/osrelease", "load_before": "/proc/loadavg"} {
		if data, err := os.ReadFile(path); err == nil {
			m[key] = strings.TrimSpace(string(data))
		}
	}
	return m
}

func (b *bench) figure(name, unit string) *Figure {
	f := &Figure{Name: name, Unit: unit}
	b.report.Figures = append(b.report.Figures, f)
	return f
}

// settle leaves a server of which nothing else is known the time to fill its pool again.
func settle(ctx context.Context) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(time.Second):
		return nil
	}
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

// discard deletes a sandbox, also when ctx has ended.
func discard(ctx context.Context, c *client.Client, id string) error {
	if id == "" {
		return nil
	}
	_, err := c.DeleteSandbox(context.WithoutCancel(ctx), id, 60)
	return err
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

func (b *bench) createArmed(ctx context.Context) error { return b.creates(ctx, b.Armed, "armed") }

func (b *bench) createUnarmed(ctx context.Context) error {
	if b.Unarmed == nil {
		return nil
	}
	return b.creates(ctx, b.Unarmed, "unarmed")
}

// creates measures create and first command on one server.
func (b *bench) creates(ctx context.Context, c *client.Client, kind string) error {
	running, first := b.figure("create to running ("+kind+")", "ms"), b.figure("create to first command done ("+kind+")", "ms")
	for range b.N {
		if err := b.Settle(ctx); err != nil {
			return err
		}
		begin := time.Now()
		id, err := create(ctx, c)
		if err == nil {
			running.addMS(time.Since(begin))
			if _, err = command(ctx, c, id, "/bin/true"); err == nil {
				first.addMS(time.Since(begin))
			}
		}
		if err = errors.Join(err, discard(ctx, c, id)); err != nil {
			return err
		}
		if err := b.createFloor(ctx, running, first); err != nil {
			return fmt.Errorf("floor: %w", err)
		}
	}
	return nil
}

// createFloor takes one sample of both floors.
func (b *bench) createFloor(ctx context.Context, running, first *Figure) error {
	if b.Floor == nil {
		return nil
	}
	if err := b.Settle(ctx); err != nil {
		return err
	}
	begin := time.Now()
	vm, err := b.Floor.Start(ctx)
	if err != nil {
		return err
	}
	running.addFloorMS(time.Since(begin))
	if err = vm.Resume(ctx); err == nil {
		_, err = vm.Run(ctx, "/bin/true")
	}
	if err == nil {
		first.addFloorMS(time.Since(begin))
	}
	return errors.Join(err, vm.Close())
}
