package bench

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
)

// crowd is how many sandboxes there are when memory is measured a second time.
const crowd = 5

// memory measures what idle sandboxes cost that have run one command, if this machine has the server's processes.
func (b *bench) memory(ctx context.Context) (err error) {
	if b.Unarmed == nil || b.UnarmedDir == "" {
		return nil
	}
	var ids []string
	defer func() {
		for _, id := range ids {
			err = errors.Join(err, discard(ctx, b.Unarmed, id))
		}
	}()
	for n := 1; n <= min(crowd, max(b.N, 2)); n++ {
		id, err := create(ctx, b.Unarmed)
		ids = append(ids, id)
		if err != nil {
			return err
		}
		if _, err := command(ctx, b.Unarmed, id, "/bin/true"); err != nil {
			return err
		}
		if n == 1 {
			if err := b.weigh(ctx, n); err != nil {
				return err
			}
		}
	}
	if err := b.weigh(ctx, len(ids)); err != nil {
		return err
	}
	return b.weighFloor(ctx)
}

// weigh measures n sandboxes.
func (b *bench) weigh(ctx context.Context, n int) error {
	if err := b.Settle(ctx); err != nil {
		return err
	}
	all := Memory(b.UnarmedDir)
	if len(all) != n {
		return fmt.Errorf("%d shims were found, there are %d sandboxes", len(all), n)
	}
	of := fmt.Sprintf(", idle PSS, 1 of %d", n)
	shim, vmm := b.figure("shim"+of, "MiB"), b.figure("VMM"+of, "MiB")
	for _, c := range all {
		shim.add(c.Shim)
		vmm.add(c.VMM)
	}
	return nil
}

// weighFloor measures a VM that has done the same without a shim, and the agent in it.
func (b *bench) weighFloor(ctx context.Context) (err error) {
	if b.Floor == nil {
		return nil
	}
	vm, err := b.Floor.Start(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, vm.Close()) }()
	if err := vm.Resume(ctx); err != nil {
		return err
	}
	if _, err := vm.Run(ctx, "/bin/true"); err != nil {
		return err
	}
	rss, err := vm.AgentRSS(ctx)
	if err != nil {
		return err
	}
	b.figure("agent in the guest, RSS", "MiB").add(float64(rss) / (1 << 20))
	if err := b.Settle(ctx); err != nil {
		return err
	}
	pid := strconv.Itoa(vm.PID())
	weight := float64(pss(pid, processes().children)) / 1024
	for _, f := range b.report.Figures {
		if strings.HasPrefix(f.Name, "VMM,") {
			f.floor = append(f.floor, weight)
		}
	}
	return nil
}
