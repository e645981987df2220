package cli

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/space-sandbox/space/internal/client"
	"github.com/space-sandbox/space/internal/config"
	"github.com/space-sandbox/space/internal/daemon"
	"github.com/space-sandbox/space/internal/sandbox"
)

// connect returns a client of the server that the environment names.
func (a *app) connect() (*client.Client, error) {
	cfg := client.Config{APIURL: a.getenv("SPACE_API_URL"), DataURL: a.getenv("SPACE_DATA_PLANE_URL"), Token: a.getenv("SPACE_API_TOKEN")}
	if cfg.APIURL == "" {
		cfg.APIURL = "http://127.0.0.1:8700"
	}
	if cfg.Token == "" {
		token, err := a.adminKey()
		if err != nil {
			return nil, err
		}
		cfg.Token = token
	}
	return client.New(cfg), nil
}

// adminKey reads the key that a server on this machine has made.
func (a *app) adminKey() (string, error) {
	dir := a.getenv("SPACE_DATA_DIR")
	if dir == "" {
		dir = config.DefaultDataDir(os.Geteuid(), a.getenv)
	}
	path := filepath.Join(dir, daemon.AdminKeyFile)
	data, err := os.ReadFile(path)
	if err != nil {
		return "", fmt.Errorf("no API key: SPACE_API_TOKEN is not set and %s cannot be read (%w); start the platform with \"space up\", or set SPACE_API_TOKEN or SPACE_DATA_DIR", path, errors.Unwrap(err))
	}
	return strings.TrimSpace(string(data)), nil
}

// createPatience is how long a create waits for a server that is still getting ready.
const createPatience = 15 * time.Minute

// createSandbox makes a running sandbox. The ID is known to got as soon as there is one, so that the caller can
// delete it even if this fails or is interrupted.
func (a *app) createSandbox(ctx context.Context, c *client.Client, req client.CreateSandbox, got func(id string)) error {
	p := a.progress()
	defer p.done()
	var acc *client.Accepted
	for begin := time.Now(); ; {
		var err error
		if acc, err = c.CreateSandbox(ctx, req); err == nil {
			break
		}
		var e *client.Error
		if !errors.As(err, &e) || e.Code != sandbox.CodeServiceUnavailable || time.Since(begin) > createPatience {
			return fmt.Errorf("create a sandbox from template %q: %w", req.Template, err)
		}
		p.say(e.Message)
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-time.After(500 * time.Millisecond):
		}
	}
	got(acc.Sandbox.ID)
	_, err := c.WaitOperation(ctx, acc.Operation.ID, func(op *client.Operation) {
		if op.Progress.Phase != "" {
			p.say("creating sandbox: " + op.Progress.Phase)
		}
	})
	if err != nil {
		return fmt.Errorf("create a sandbox from template %q: %w", req.Template, err)
	}
	return nil
}
