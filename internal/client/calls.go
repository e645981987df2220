package client

import (
	"context"
	"io"
	"net/http"
	"net/url"
	"strconv"
)

// CreateSandbox asks for a sandbox and answers at once, so that its ID is known whatever happens next.
func (c *Client) CreateSandbox(ctx context.Context, in CreateSandbox) (*Accepted, error) {
	var out Accepted
	return &out, c.call(ctx, c.api(http.MethodPost, "/sandboxes", nil), in, &out)
}

// Sandboxes lists all sandboxes that the filters match.
func (c *Client) Sandboxes(ctx context.Context, filters url.Values) ([]*Sandbox, error) {
	return all[*Sandbox](ctx, c, "/sandboxes", filters)
}

// SandboxPage reads the first page of sandboxes only.
func (c *Client) SandboxPage(ctx context.Context, limit int) ([]*Sandbox, error) {
	var p page[*Sandbox]
	err := c.call(ctx, c.api(http.MethodGet, "/sandboxes", url.Values{"limit": {strconv.Itoa(limit)}}), nil, &p)
	return p.Items, err
}

// Sandbox returns one sandbox.
func (c *Client) Sandbox(ctx context.Context, id string) (*Sandbox, error) {
	var out Sandbox
	return &out, c.call(ctx, c.api(http.MethodGet, sandboxPath(id, ""), nil), nil, &out)
}

// DeleteSandbox deletes a sandbox; wait is how many seconds to wait for its end, 0 for none.
func (c *Client) DeleteSandbox(ctx context.Context, id string, wait int) (*Operation, error) {
	r := c.api(http.MethodDelete, sandboxPath(id, ""), nil)
	if wait > 0 {
		r.header.Set("Prefer", "wait="+strconv.Itoa(wait))
	}
	var out Accepted
	return out.Operation, c.call(ctx, r, nil, &out)
}

// WaitOperation returns when the operation has ended; a failed one is its error. progress, if not nil, is told every
// state that is seen on the way.
func (c *Client) WaitOperation(ctx context.Context, id string, progress func(*Operation)) (*Operation, error) {
	wait := "60"
	if progress != nil {
		wait = "1"
	}
	for {
		var op Operation
		if err := c.call(ctx, c.api(http.MethodGet, "/operations/"+url.PathEscape(id), url.Values{"wait": {wait}}), nil, &op); err != nil {
			return nil, err
		}
		if progress != nil {
			progress(&op)
		}
		if op.Ended() {
			if op.Error != nil {
				return &op, op.Error
			}
			return &op, nil
		}
	}
}

func sandboxPath(id, rest string) string { return "/sandboxes/" + url.PathEscape(id) + rest }

func processPath(id, pid, rest string) string {
	return sandboxPath(id, "/processes/"+url.PathEscape(pid)+rest)
}

// CreateCommand makes a process and a session to follow it.
func (c *Client) CreateCommand(ctx context.Context, id string, in CreateCommand) (*Command, error) {
	var out Command
	return &out, c.call(ctx, c.api(http.MethodPost, sandboxPath(id, "/commands"), nil), in, &out)
}

// Processes lists the processes of a sandbox.
func (c *Client) Processes(ctx context.Context, id string) ([]*Process, error) {
	return all[*Process](ctx, c, sandboxPath(id, "/processes"), nil)
}

// Process returns one process.
func (c *Client) Process(ctx context.Context, id, pid string) (*Process, error) {
	var out Process
	return &out, c.call(ctx, c.api(http.MethodGet, processPath(id, pid, ""), nil), nil, &out)
}

// KillProcess kills a process with all its children.
func (c *Client) KillProcess(ctx context.Context, id, pid string) (*Process, error) {
	var out Process
	return &out, c.call(ctx, c.api(http.MethodPost, processPath(id, pid, "/kill"), nil), nil, &out)
}

// NewSession makes another session of a process.
func (c *Client) NewSession(ctx context.Context, id, pid string) (Session, error) {
	var out struct {
		Session Session `json:"session"`
	}
	return out.Session, c.call(ctx, c.api(http.MethodPost, processPath(id, pid, "/sessions"), nil), nil, &out)
}

// Output streams what a process has written so far on one stream. The caller closes it.
func (c *Client) Output(ctx context.Context, id, pid, stream string) (io.ReadCloser, error) {
	resp, err := c.send(ctx, c.api(http.MethodGet, processPath(id, pid, "/output"), url.Values{"stream": {stream}}))
	if err != nil {
		return nil, err
	}
	return resp.Body, nil
}

// Templates lists the templates.
func (c *Client) Templates(ctx context.Context) ([]*Template, error) {
	return all[*Template](ctx, c, "/templates", nil)
}

// Template returns one template.
func (c *Client) Template(ctx context.Context, name string) (*Template, error) {
	var out Template
	return &out, c.call(ctx, c.api(http.MethodGet, "/templates/"+url.PathEscape(name), nil), nil, &out)
}

// CreateKey makes an API key.
func (c *Client) CreateKey(ctx context.Context, in CreateKey) (*Key, error) {
	var out Key
	return &out, c.call(ctx, c.api(http.MethodPost, "/api-keys", nil), in, &out)
}

// Keys lists the API keys.
func (c *Client) Keys(ctx context.Context) ([]*Key, error) {
	return all[*Key](ctx, c, "/api-keys", nil)
}

// RevokeKey revokes an API key.
func (c *Client) RevokeKey(ctx context.Context, id string) (*Key, error) {
	var out Key
	return &out, c.call(ctx, c.api(http.MethodDelete, "/api-keys/"+url.PathEscape(id), nil), nil, &out)
}

// ReadFile opens a file of a sandbox. The caller closes it.
func (c *Client) ReadFile(ctx context.Context, id, path string) (io.ReadCloser, error) {
	resp, err := c.send(ctx, c.api(http.MethodGet, sandboxPath(id, "/files/content"), url.Values{"path": {path}}))
	if err != nil {
		return nil, err
	}
	return resp.Body, nil
}

// WriteFile writes a file of a sandbox, with its parent folders. size -1 means that it is not known; mode "" is the
// default.
func (c *Client) WriteFile(ctx context.Context, id, path, mode string, size int64, content io.Reader) (*Entry, error) {
	q := url.Values{"path": {path}, "parents": {"true"}}
	if mode != "" {
		q.Set("mode", mode)
	}
	r := c.api(http.MethodPut, sandboxPath(id, "/files/content"), q)
	r.header.Set("Content-Type", "application/octet-stream")
	if r.body, r.size = content, size; size == 0 {
		r.body = http.NoBody
	}
	var out Entry
	return &out, c.call(ctx, r, nil, &out)
}

// Stat describes a file.
func (c *Client) Stat(ctx context.Context, id, path string) (*Entry, error) {
	var out Entry
	return &out, c.call(ctx, c.api(http.MethodGet, sandboxPath(id, "/files/stat"), url.Values{"path": {path}, "follow": {"true"}}), nil, &out)
}

// Files lists a folder to the given depth.
func (c *Client) Files(ctx context.Context, id, path string, depth int) ([]*Entry, error) {
	return all[*Entry](ctx, c, sandboxPath(id, "/files"), url.Values{"path": {path}, "depth": {strconv.Itoa(depth)}, "limit": {"1000"}})
}

// MakeDirectory makes a folder with its parents; one that is there already is fine.
func (c *Client) MakeDirectory(ctx context.Context, id, path string) error {
	in := map[string]any{"path": path, "parents": true}
	return c.call(ctx, c.api(http.MethodPost, sandboxPath(id, "/files/mkdir"), nil), in, nil)
}
