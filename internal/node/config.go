package node

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	nodev1 "github.com/space-sandbox/space/internal/gen/space/node/v1"
	"github.com/space-sandbox/space/internal/vmm"
)

// Config is what an operator can set. Zero fields mean the default that each comment names.
type Config struct {
	// Name of the node; default: the host name.
	Name string
	// DataDir holds everything that must survive a restart. Required, on a local file system.
	DataDir string
	// RuntimeDir holds sockets. Required; short, since socket paths are limited to 100 bytes.
	RuntimeDir string
	// ShimPath is the shim program; default: the one inside this binary, written below DataDir.
	ShimPath string
	// MemoryLimitMiB bounds what all VMs together may use; default: 90 % of what is available at start.
	MemoryLimitMiB uint64
	// DiskReserveMiB is free space of DataDir below which creates are refused; default 1024.
	DiskReserveMiB uint64
	// PoolSize is how many armed VMs are kept per shape; default 2, negative: none.
	PoolSize int
	// PoolShapes is how many shapes, the last used ones, have armed VMs; default 4.
	PoolShapes int
	// Defaults is the shape that is kept ready from the start; default: the base template's.
	Defaults *nodev1.Resources
	// VMMUIDBase is where the uids begin of which every VMM gets one of its own if the node is root; default 200000.
	// A uid is used again only after the VMM's death was seen. Nodes that share a machine need ranges apart.
	VMMUIDBase uint32
	// CreateTimeout bounds one create, a first build of its shape included; default 15 min.
	CreateTimeout time.Duration
	// ArmTimeout bounds restoring a VM; default 60 s. BindTimeout bounds giving it its identity; default 30 s.
	ArmTimeout, BindTimeout time.Duration
	// CaptureTimeout bounds making the snapshot of one shape; default 5 min.
	CaptureTimeout time.Duration
	// DeleteTimeout bounds ending one sandbox; default 20 s. A delete that fails can be repeated.
	DeleteTimeout time.Duration
	// Log receives what happens; default: nothing.
	Log *slog.Logger
}

// Template is a starting filesystem as the node uses it.
type Template struct {
	Name, Tag   string
	Digest      string   // sha256:<hex>
	Layers      []string // read-only ext4 images, lowest first
	SizeBytes   uint64
	CreatedAt   time.Time
	DefaultUser string
	Description string
	Defaults    *nodev1.Resources
	WarmUp      []string // command lines run once before the capture, to fill the page cache
}

// Guest is the kernel and initial file system that VMs boot.
type Guest struct {
	Kernel, Initrd string // files
	Digest         string // of both; hex
	Version        string // of the kernel
}

// ProgressFunc is told how far slow work is; total may be 0. It must return quickly.
type ProgressFunc func(phase string, done, total uint64)

// Images makes and keeps template content.
type Images interface {
	// Base returns the base template, and builds it if it is missing.
	Base(ctx context.Context, progress ProgressFunc) (*Template, error)
}

// Guests makes and keeps what VMs boot.
type Guests interface {
	Guest(ctx context.Context, progress ProgressFunc) (*Guest, error)
}

// Disks makes disk images.
type Disks interface {
	// Base makes a raw image that holds an empty file system.
	Base(ctx context.Context, path string, sizeMiB uint32) error
	// Top makes an empty qcow2 image over backing, nearest first; the last one is raw.
	Top(ctx context.Context, path string, backing []string, sizeMiB uint32) error
}

// Machine is the part of vmm.Driver that the node itself uses; VMs are started by shims.
type Machine interface {
	Name() string
	Probe(ctx context.Context, kernel, initrd string) (vmm.Capabilities, error)
	OpenMemory(ctx context.Context, caps vmm.Capabilities, path string) (*os.File, error)
}

// Deps is what a node is made of.
type Deps struct {
	Images  Images
	Guests  Guests
	Disks   Disks
	Machine Machine
}

func (c Config) withDefaults() (Config, error) {
	if c.DataDir == "" || c.RuntimeDir == "" {
		return c, errors.New("node: DataDir and RuntimeDir are required")
	}
	var err error
	if c.DataDir, err = filepath.Abs(c.DataDir); err != nil {
		return c, err
	}
	if c.RuntimeDir, err = filepath.Abs(c.RuntimeDir); err != nil {
		return c, err
	}
	if c.Name == "" {
		if c.Name, err = os.Hostname(); err != nil {
			return c, err
		}
	}
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	setDefault(&c.VMMUIDBase, 200000)
	setDefault(&c.DiskReserveMiB, 1024)
	setDefault(&c.PoolSize, 2)
	c.PoolSize = max(0, c.PoolSize)
	setDefault(&c.PoolShapes, 4)
	setDefault(&c.CreateTimeout, 15*time.Minute)
	setDefault(&c.ArmTimeout, time.Minute)
	setDefault(&c.BindTimeout, 30*time.Second)
	setDefault(&c.CaptureTimeout, 5*time.Minute)
	setDefault(&c.DeleteTimeout, 20*time.Second)
	return c, nil
}

func setDefault[T comparable](field *T, value T) {
	var zero T
	if *field == zero {
		*field = value
	}
}
