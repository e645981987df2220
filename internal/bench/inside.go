package bench

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"time"
)

const (
	bulk     = 64 << 20 // bytes of output and of files
	maxBulk  = 5        // samples of what moves that much
	bulkFile = "/home/user/bench"
)

// many makes 1,000 files and removes them.
const many = "import os,shutil\nos.makedirs('/tmp/b',exist_ok=True)\nfor i in range(1000): open(f'/tmp/b/{i}','wb').write(b'x'*4096)\nshutil.rmtree('/tmp/b')"

// step is one figure: how it is measured, and its floor, which may be nil.
type step struct {
	name      string
	n         int
	warm      int // rounds before the first that counts: cold code in the guest is no figure of its own
	fn, floor func(context.Context) error
}

// withSandbox measures what happens inside of one sandbox.
func (b *bench) withSandbox(ctx context.Context) (err error) {
	b.id, err = create(ctx, b.Armed)
	defer func() { err = errors.Join(err, discard(ctx, b.Armed, b.id)) }()
	if err != nil {
		return err
	}
	if b.Floor != nil {
		if b.raw, err = b.Floor.Start(ctx); err != nil {
			return fmt.Errorf("floor: %w", err)
		}
		defer func() { err = errors.Join(err, b.raw.Close()) }()
		if err := b.raw.Resume(ctx); err != nil {
			return fmt.Errorf("floor: %w", err)
		}
	}
	if err := b.Settle(ctx); err != nil {
		return err
	}
	few := min(b.N, maxBulk)
	for _, s := range []step{
		{"exec round trip (/bin/true)", b.N, 5, b.run(0, "/bin/true"), b.bare(0, "/bin/true")},
		{"64 MiB of stdout", few, 0, b.run(bulk, "head", "-c", fmt.Sprint(bulk), "/dev/zero"), b.bare(bulk, "head", "-c", fmt.Sprint(bulk), "/dev/zero")},
		{"64 MiB file up", few, 0, b.up, func(ctx context.Context) error { return b.raw.WriteFile(ctx, bulkFile, bulk) }},
		{"64 MiB file down", few, 0, b.down, b.bareDown},
		{"1,000 x 4 KiB files made in the guest", few, 1, b.run(0, "python3", "-c", many), b.bare(0, "python3", "-c", many)},
		{"API read", b.N, 1, b.read, nil},
	} {
		if err := b.measure(ctx, s); err != nil {
			return fmt.Errorf("%s: %w", s.name, err)
		}
	}
	return b.readRate(ctx)
}

// measure takes the samples of one figure, and those of its floor between them.
func (b *bench) measure(ctx context.Context, s step) error {
	b.Say(s.name)
	f := b.figure(s.name, "ms")
	for i := range s.warm + s.n {
		begin := time.Now()
		if err := s.fn(ctx); err != nil {
			return err
		}
		if i >= s.warm {
			f.addMS(time.Since(begin))
		}
		if b.raw == nil || s.floor == nil {
			continue
		}
		begin = time.Now()
		if err := s.floor(ctx); err != nil {
			return fmt.Errorf("floor: %w", err)
		}
		if i >= s.warm {
			f.addFloorMS(time.Since(begin))
		}
	}
	return nil
}

func short(got, want int) error {
	if got != want {
		return fmt.Errorf("%d of %d bytes arrived", got, want)
	}
	return nil
}

// run returns what runs a command that writes so many bytes.
func (b *bench) run(want int, argv ...string) func(context.Context) error {
	return func(ctx context.Context) error {
		n, err := command(ctx, b.Armed, b.id, argv...)
		if err != nil {
			return err
		}
		return short(n, want)
	}
}

// bare is run for the floor.
func (b *bench) bare(want int, argv ...string) func(context.Context) error {
	return func(ctx context.Context) error {
		res, err := b.raw.Run(ctx, argv...)
		if err != nil {
			return err
		}
		return short(res.Bytes, want)
	}
}

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
	if err != nil {
		return err
	}
	return short(int(n), bulk)
}

func (b *bench) bareDown(ctx context.Context) error {
	n, err := b.raw.ReadFile(ctx, bulkFile)
	if err != nil {
		return err
	}
	return short(n, bulk)
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
