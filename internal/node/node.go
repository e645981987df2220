package node

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"connectrpc.com/connect"
	"golang.org/x/sys/unix"

	nodev1 "github.com/space-sandbox/space/internal/gen/space/node/v1"
	shimv1 "github.com/space-sandbox/space/internal/gen/space/shim/v1"
	"github.com/space-sandbox/space/internal/node/cgroup"
	"github.com/space-sandbox/space/internal/node/shims"
)

var errClosed = connect.NewError(connect.CodeUnavailable, errors.New("the node service is stopping"))

// Node is one machine's sandboxes. It is made by New, works between Start and Close, and is safe for concurrent use.
type Node struct {
	cfg  Config
	deps Deps
	log  *slog.Logger

	// Set by Start, not changed after.
	l       layout
	lock    *os.File
	cgroups *cgroup.Tree
	shims   *shims.Manager
	gens    *generations
	total   uint64 // MiB of the machine that VMs may use

	admission *admission
	uids      *slots
	pool      *pool
	copies    copyBuffers   // of what route passes on
	refill    chan struct{} // pokes refillLoop
	kick      chan struct{} // pokes prepareLoop
	creating  atomic.Int32  // creates under way: refilling waits for none

	ctx    context.Context //nolint:containedctx // the life of the node's own goroutines
	cancel context.CancelFunc
	wg     sync.WaitGroup

	mu        sync.Mutex // guards what follows; never held across a call to a shim, a file or a process
	started   bool
	closed    bool
	unsafe    string // why nothing may be swept or created
	prep      preparing
	arming    *arming // the last refill that was begun
	warms     map[string]*warmBuild
	sandboxes map[string]*entry
	watchers  map[*watcher]struct{}
}

// New returns a node that does nothing yet.
func New(cfg Config, deps Deps) (*Node, error) {
	cfg, err := cfg.withDefaults()
	if err != nil {
		return nil, err
	}
	if deps.Images == nil || deps.Guests == nil || deps.Disks == nil || deps.Machine == nil {
		return nil, errors.New("node: a dependency is missing")
	}
	n := &Node{
		cfg: cfg, deps: deps, log: cfg.Log,
		admission: &admission{}, uids: &slots{used: map[uint32]bool{}},
		pool:   newPool(cfg.PoolSize, cfg.PoolShapes),
		refill: make(chan struct{}, 1), kick: make(chan struct{}, 1),
		prep:      preparing{state: nodev1.TemplateState_TEMPLATE_STATE_BUILDING, changed: make(chan struct{})},
		warms:     map[string]*warmBuild{},
		sandboxes: map[string]*entry{},
		watchers:  map[*watcher]struct{}{},
	}
	n.ctx, n.cancel = context.WithCancel(context.Background())
	return n, nil
}

// Start locks the data folder, adopts what lives, sweeps what has no record and begins to get ready in the
// background. ctx bounds the start only. After an error the node is of no more use.
func (n *Node) Start(ctx context.Context) (err error) {
	l, instance, err := makeFolders(n.cfg)
	if err != nil {
		return err
	}
	n.l = l
	if n.lock, err = lockFolder(l.node()); err != nil {
		return err
	}
	defer func() {
		if err != nil {
			_ = n.lock.Close()
		}
	}()
	n.cgroups = cgroup.Discover(instance)
	n.shims = &shims.Manager{Dir: l.shims(), Runtime: l.run, Binary: n.cfg.ShimPath, Cgroups: n.cgroups, Log: n.log, Limit: limit}
	if n.shims.Binary == "" {
		if n.shims.Binary, err = installShim(n.cfg.DataDir); err != nil {
			return err
		}
	}
	if n.total, err = availableMiB(); err != nil {
		return fmt.Errorf("memory: %w", err)
	}
	if n.gens, err = openGenerations(l.generations(), time.Now()); err != nil {
		return err
	}
	n.admission.limit = n.cfg.MemoryLimitMiB
	if n.admission.limit == 0 {
		n.admission.limit = n.total / 10 * 9
	}
	if err := n.adopt(ctx); err != nil {
		return errors.Join(err, n.gens.close())
	}
	n.mu.Lock()
	n.started = true
	unsafe := n.unsafe != ""
	n.mu.Unlock()
	if !unsafe {
		n.wg.Go(n.prepareLoop)
		n.wg.Go(n.refillLoop)
	}
	return nil
}

// Close ends armed VMs and the node's goroutines and frees the data folder. Bound sandboxes go on: the next node
// adopts them. Creates under way are undone. Safe to call twice.
func (n *Node) Close() error {
	n.mu.Lock()
	if n.closed || !n.started {
		n.closed = true
		n.mu.Unlock()
		n.cancel()
		return nil
	}
	n.closed = true
	n.mu.Unlock()
	n.cancel()
	n.destroyArmed(n.ctx, n.pool.empty())
	n.wg.Wait()
	// A refill that was under way may have offered one more.
	n.destroyArmed(n.ctx, n.pool.empty())
	n.mu.Lock()
	all := n.sandboxes
	warms := n.warms
	n.mu.Unlock()
	for _, e := range all {
		if e.shim != nil {
			e.shim.Release()
		}
		if err := e.archive.close(); err != nil {
			n.log.Warn("close journal", "sandbox", e.id, "error", err)
		}
	}
	for _, b := range warms {
		if b.w != nil {
			_ = b.w.memory.Close()
		}
	}
	n.cgroups.Close()
	return errors.Join(n.dropRuntimeFolder(), n.gens.close(), n.lock.Close())
}

// dropRuntimeFolder removes the folder of sockets unless a sandbox that goes on has one in it.
func (n *Node) dropRuntimeFolder() error {
	err := os.Remove(n.l.run)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENOTEMPTY) {
		return nil
	}
	return err
}

// StopAll ends every sandbox on this node, with its record, as if each had been deleted.
func (n *Node) StopAll(ctx context.Context) error {
	n.mu.Lock()
	var ids []string
	for id := range n.sandboxes {
		ids = append(ids, id)
	}
	n.mu.Unlock()
	errs := make([]error, len(ids))
	var wg sync.WaitGroup
	for i, id := range ids {
		wg.Go(func() { errs[i] = n.delete(ctx, id, 0) })
	}
	wg.Wait()
	return errors.Join(errs...)
}

// Room in a VM's cgroup beside the guest's memory: the VMM, the shim, and page cache that is charged to whoever
// touched it first and can be taken back at any time.
const cgroupSlackMiB = 512

// limit is the last line against a VMM or shim that grows beyond what admission counts. Where a controller is
// missing there is no limit, which GetNode reports.
func limit(spec *shimv1.LaunchSpec) {
	r := spec.GetResources()
	cgroup.Limit(spec.Cgroup, (uint64(r.GetMemoryMib())+cgroupSlackMiB)<<20, r.GetVcpu()+1)
}

// admit reserves memory, and ends armed VMs if that makes room. It answers at once if there is none.
func (n *Node) admit(ctx context.Context, mib uint64) (*reservation, error) {
	if r, ok := n.admission.reserve(mib); ok {
		return r, nil
	}
	if mib <= n.admission.limit { // else nothing would help
		n.stopArming()
		n.destroyArmed(ctx, n.pool.evict(n.admission.missing(mib)))
	}
	if r, ok := n.admission.reserve(mib); ok {
		return r, nil
	}
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	used, limit := n.admission.totals()
	return nil, connect.NewError(connect.CodeResourceExhausted,
		fmt.Errorf("no room for %d MiB of memory: %d of %d MiB are in use", mib, used, limit))
}

// diskRoom refuses new VMs while the disk is nearly full: those that run need the rest.
func (n *Node) diskRoom() error {
	free, err := freeMiB(n.cfg.DataDir)
	if err != nil {
		return fmt.Errorf("free disk space: %w", err)
	}
	if free < n.cfg.DiskReserveMiB {
		return connect.NewError(connect.CodeResourceExhausted,
			fmt.Errorf("the disk is nearly full: %d MiB free, %d MiB are kept in reserve", free, n.cfg.DiskReserveMiB))
	}
	return nil
}

// destroyArmed ends VMs that the caller has claimed, all at once, also when ctx has ended.
func (n *Node) destroyArmed(ctx context.Context, vms []*armed) {
	var wg sync.WaitGroup
	for _, a := range vms {
		wg.Go(func() {
			if n.destroyShim(ctx, a.shim) == nil {
				a.memory.release()
			}
		})
	}
	wg.Wait()
}
