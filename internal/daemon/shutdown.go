package daemon

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"sync"
	"time"

	"github.com/space-sandbox/space/internal/auth"
	"github.com/space-sandbox/space/internal/control"
	"github.com/space-sandbox/space/internal/sandbox"
)

// stopTimeout bounds ending all sandboxes.
const stopTimeout = 30 * time.Second

// shutdown ends streams and requests, then, if that is wanted, all sandboxes.
func (d *daemon) shutdown(servers []*http.Server) error {
	d.log.Info("shutting down")
	ctx, cancel := context.WithTimeout(context.Background(), d.cfg.DrainTimeout)
	defer cancel()
	var wg sync.WaitGroup
	for _, drain := range []func(context.Context) error{d.api.Drain, d.data.Drain} {
		wg.Go(func() {
			if err := drain(ctx); err != nil {
				d.log.Warn("requests were cut that did not end in time", "error", err)
			}
		})
	}
	wg.Wait()
	for _, s := range servers {
		if err := s.Shutdown(ctx); err != nil {
			_ = s.Close() // cuts what is left; the listener is closed either way
		}
	}
	if !d.cfg.StopSandboxes {
		return nil
	}
	return d.stopSandboxes()
}

// stopSandboxes deletes every sandbox through the control plane, so that records and VMs end together.
func (d *daemon) stopSandboxes() error {
	ctx, cancel := context.WithTimeout(context.Background(), stopTimeout)
	defer cancel()
	admin := &auth.Principal{ProjectID: auth.DefaultProject, Scopes: sandbox.AllScopes()}
	var errs []error
	cursor := ""
	for {
		page, err := d.plane.ListSandboxes(ctx, admin, control.ListSandboxes{Limit: sandbox.MaxPageLimit, Cursor: cursor})
		if err != nil {
			return fmt.Errorf("stop sandboxes: %w", err)
		}
		errs = append(errs, d.deleteAll(ctx, admin, page.Items)...)
		if page.NextCursor == "" {
			break
		}
		cursor = page.NextCursor
	}
	// What the records do not know, and what could not be deleted in time.
	errs = append(errs, d.node.StopAll(ctx))
	return errors.Join(errs...)
}

func (d *daemon) deleteAll(ctx context.Context, admin *auth.Principal, items []*sandbox.Sandbox) []error {
	errs := make([]error, len(items))
	var wg sync.WaitGroup
	for i, s := range items {
		wg.Go(func() {
			acc, err := d.plane.DeleteSandbox(ctx, admin, s.ID, nil)
			if err == nil {
				_, err = d.plane.GetOperation(ctx, admin, acc.Operation.ID, stopTimeout)
			}
			if sandbox.CodeOf(err) != sandbox.CodeNotFound {
				errs[i] = err
			}
		})
	}
	wg.Wait()
	return errs
}

// tellReady logs what the server waits for, and when sandboxes can be created.
func (d *daemon) tellReady(ctx context.Context) {
	said, begin := "", time.Now()
	for {
		err := d.plane.Ready(ctx)
		if ctx.Err() != nil {
			return
		}
		if err == nil {
			d.log.Info("ready", "after", time.Since(begin).Round(time.Millisecond))
			return
		}
		if text := sandbox.AsError(err).Message; text != said {
			said = text
			d.log.Info("not ready yet", "reason", text)
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(500 * time.Millisecond):
		}
	}
}
