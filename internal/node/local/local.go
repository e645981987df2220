package local

import (
	"context"
	"fmt"

	"github.com/space-sandbox/space/internal/disk"
	"github.com/space-sandbox/space/internal/embedded"
	nodev1 "github.com/space-sandbox/space/internal/gen/space/node/v1"
	"github.com/space-sandbox/space/internal/guest"
	"github.com/space-sandbox/space/internal/image"
	"github.com/space-sandbox/space/internal/node"
)

// warmUp runs what agents run first, so that its pages are in the snapshot's page cache. What a template lacks is
// passed over; what it has must work.
var warmUp = []string{
	`/bin/sh -c :`,
	`if command -v python3 >/dev/null; then python3 -c 'import json, os, subprocess, sys'; fi`,
	`if command -v node >/dev/null; then node -e 0; fi`,
}

// Deps returns what a node on this machine is made of. agent returns the program that runs as PID 1 in the guest;
// nil means the one that this binary carries.
func Deps(cache *image.Cache, machine node.Machine, agent func() ([]byte, error)) node.Deps {
	if agent == nil {
		agent = embedded.Agent
	}
	return node.Deps{
		Images:  images{cache},
		Guests:  guests{cache, agent},
		Disks:   disk.Images{},
		Machine: machine,
	}
}

type images struct{ cache *image.Cache }

// Base implements node.Images.
func (i images) Base(ctx context.Context, progress node.ProgressFunc) (*node.Template, error) {
	t, err := i.cache.Base(ctx, convert(progress))
	if err != nil {
		return nil, err
	}
	return &node.Template{
		Name: t.Name, Tag: t.Tag, Digest: t.Digest, Layers: t.Layers, SizeBytes: uint64(max(0, t.SizeBytes)),
		CreatedAt: t.CreatedAt, DefaultUser: t.DefaultUser, Description: t.Description, WarmUp: warmUp,
		Defaults: &nodev1.Resources{Vcpu: t.Defaults.VCPU, MemoryMib: t.Defaults.MemoryMiB, DiskMib: t.Defaults.DiskMiB},
	}, nil
}

type guests struct {
	cache *image.Cache
	agent func() ([]byte, error)
}

// Guest implements node.Guests.
func (g guests) Guest(ctx context.Context, progress node.ProgressFunc) (*node.Guest, error) {
	agent, err := g.agent()
	if err != nil {
		return nil, fmt.Errorf("guest agent: %w", err)
	}
	built, err := guest.Build(ctx, g.cache, agent, convert(progress))
	if err != nil {
		return nil, err
	}
	return &node.Guest{Kernel: built.Kernel, Initrd: built.Initrd, Digest: built.Digest, Version: built.KernelVersion}, nil
}

// convert adapts a progress function. Negative numbers, which mean nothing, become 0.
func convert(progress node.ProgressFunc) image.Progress {
	return func(phase string, done, total int64) {
		progress(phase, uint64(max(0, done)), uint64(max(0, total)))
	}
}
