package qmp

import (
	"context"
	"os"
	"strconv"
)

// Run states of a machine that callers tell apart. There are more.
const (
	Running       = "running"
	Paused        = "paused"
	InMigrate     = "inmigrate"
	InternalError = "internal-error"
)

// Status is the machine's run state.
func (c *Client) Status(ctx context.Context) (string, error) {
	var s struct {
		Status string `json:"status"`
	}
	err := c.Do(ctx, "query-status", nil, &s)
	return s.Status, err
}

// Stop halts all vCPUs and flushes the disks.
func (c *Client) Stop(ctx context.Context) error { return c.Do(ctx, "stop", nil, nil) }

// Cont lets the guest run.
func (c *Client) Cont(ctx context.Context) error { return c.Do(ctx, "cont", nil, nil) }

// WatchMigration makes QEMU send MIGRATION events.
func (c *Client) WatchMigration(ctx context.Context) error {
	type capability struct {
		Capability string `json:"capability"`
		State      bool   `json:"state"`
	}
	args := map[string]any{"capabilities": []capability{{"events", true}}}
	return c.Do(ctx, "migrate-set-capabilities", args, nil)
}

// MigrateIncoming starts loading state from f, which QEMU gets a duplicate of.
func (c *Client) MigrateIncoming(ctx context.Context, f *os.File) error {
	const name = "state"
	if err := c.Do(ctx, "getfd", map[string]any{"fdname": name}, nil, f); err != nil {
		return err
	}
	return c.Do(ctx, "migrate-incoming", map[string]any{"uri": "fd:" + name}, nil)
}

// SaveDeviceState writes the state of everything but memory and disks to f, which must be open for writing only:
// QEMU refuses any other mode. It returns when all is written.
func (c *Client) SaveDeviceState(ctx context.Context, f *os.File) error {
	const set = 9 // used by nothing else; emptied below
	if err := c.Do(ctx, "add-fd", map[string]any{"fdset-id": set}, nil, f); err != nil {
		return err
	}
	args := map[string]any{"filename": "/dev/fdset/" + strconv.Itoa(set), "live": false}
	err := c.Do(ctx, "xen-save-devices-state", args, nil)
	if e := c.Do(ctx, "remove-fd", map[string]any{"fdset-id": set}, nil); err == nil {
		err = e
	}
	return err
}

// HasProperty tells whether objects of a type have a property.
func (c *Client) HasProperty(ctx context.Context, typeName, property string) (bool, error) {
	var list []struct {
		Name string `json:"name"`
	}
	if err := c.Do(ctx, "qom-list-properties", map[string]any{"typename": typeName}, &list); err != nil {
		return false, err
	}
	for _, p := range list {
		if p.Name == property {
			return true, nil
		}
	}
	return false, nil
}

// HasMachine tells whether QEMU has a type of machine.
func (c *Client) HasMachine(ctx context.Context, name string) (bool, error) {
	var list []struct {
		Name string `json:"name"`
	}
	if err := c.Do(ctx, "query-machines", nil, &list); err != nil {
		return false, err
	}
	for _, m := range list {
		if m.Name == name {
			return true, nil
		}
	}
	return false, nil
}
