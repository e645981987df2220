package api

import (
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/space-sandbox/space/internal/api/wire"
	"github.com/space-sandbox/space/internal/control"
	"github.com/space-sandbox/space/internal/sandbox"
)

// laterFields refuses fields of a create that are named in the API's plan but not available yet: they are no typos,
// so the answer says what to do instead.
func laterFields(object map[string]any, request any) error {
	if _, ok := request.(CreateSandbox); !ok {
		return nil
	}
	for _, name := range []string{"network", "network_credential_rules", "volumes"} {
		if _, ok := object[name]; ok {
			return sandbox.Errorf(sandbox.CodeFailedPrecondition, "%s is not available yet", name).
				WithRemediation("create the sandbox without " + name)
		}
	}
	return nil
}

func (s *Server) createSandbox(c *call) error {
	lifecycle := defaultLifecycle()
	in := CreateSandbox{Environment: "auto", Lifecycle: &lifecycle, Resources: &ResourcesRequest{}}
	if err := c.decode(&in); err != nil {
		return err
	}
	check := &checker{schemas: s.schemas}
	check.metadata(in.Metadata)
	check.env("env", in.Env)
	if err := check.err(); err != nil {
		return err
	}
	req := control.CreateSandbox{
		Template: in.Template, Environment: in.Environment, Metadata: in.Metadata, Env: in.Env, Lifecycle: lifecycle.lifecycle(),
		Resources: sandbox.Resources(*in.Resources),
	}
	accepted, err := c.svc().CreateSandbox(c.ctx(), c.p, req, c.idem)
	if err != nil {
		return err
	}
	c.Header().Set("Location", "/v1/sandboxes/"+string(accepted.Sandbox.ID))
	return c.accepted(accepted, http.StatusCreated)
}

// accepted answers an asynchronous verb: at once with 202, or as Prefer: wait asks with the final state.
func (c *call) accepted(a control.Accepted, done int) error {
	c.replayed(a.Replayed)
	status := http.StatusAccepted
	if wait, ok := wire.PreferWait(c.r.Header); ok {
		c.Header().Set("Preference-Applied", "wait="+strconv.Itoa(int(wait/time.Second)))
		op, err := c.waitOperation(a.Operation.ID, wait)
		if err != nil {
			return err
		}
		a.Operation = op
		if op.State == sandbox.OpFailed && op.Error != nil {
			return op.Error.Err()
		}
		if op.State.Ended() {
			status = done
		}
		if a.Sandbox != nil && op.Kind == sandbox.OpCreate {
			fresh, err := c.svc().GetSandbox(c.ctx(), c.p, a.Sandbox.ID)
			if err != nil && sandbox.CodeOf(err) != sandbox.CodeForbidden { // a key may create without reading
				return err
			}
			if err == nil {
				a.Sandbox = fresh
			}
		}
	}
	if done == http.StatusCreated {
		return c.json(status, SandboxAccepted{Sandbox: sandboxOf(a.Sandbox), Operation: operationOf(a.Operation)})
	}
	return c.json(status, OperationAccepted{Operation: operationOf(a.Operation)})
}

// waitOperation waits for an operation to end. A draining server answers with what there is.
func (c *call) waitOperation(id sandbox.OperationID, wait time.Duration) (*sandbox.Operation, error) {
	ctx, cancel := c.draining()
	defer cancel()
	op, err := c.svc().GetOperation(ctx, c.p, id, wait)
	if err != nil && ctx.Err() != nil && c.ctx().Err() == nil {
		return c.svc().GetOperation(c.ctx(), c.p, id, 0)
	}
	return op, err
}

func (s *Server) getSandbox(c *call) error {
	id, err := c.sandboxID()
	if err != nil {
		return err
	}
	sb, err := c.svc().GetSandbox(c.ctx(), c.p, id)
	if err != nil {
		return err
	}
	c.Header().Set("Etag", etag(sb.Version))
	return c.json(http.StatusOK, sandboxOf(sb))
}

func (s *Server) listSandboxes(c *call) error {
	q := control.ListSandboxes{
		Template: c.query.Get("template"), Descending: c.query.Get("order") == "desc",
		Cursor: c.query.Get("cursor"), Limit: c.number("limit", sandbox.DefaultPageLimit),
	}
	for _, state := range c.query["state"] {
		q.States = append(q.States, sandbox.State(state))
	}
	for name, values := range c.query {
		if key, ok := strings.CutPrefix(name, "metadata["); ok {
			if q.Metadata == nil {
				q.Metadata = map[string]string{}
			}
			q.Metadata[strings.TrimSuffix(key, "]")] = values[0]
		}
	}
	check := &checker{schemas: s.schemas}
	check.metadata(q.Metadata)
	if err := check.err(); err != nil {
		return err
	}
	page, err := c.svc().ListSandboxes(c.ctx(), c.p, q)
	if err != nil {
		return err
	}
	out := SandboxPage{Items: make([]*Sandbox, 0, len(page.Items)), NextCursor: textOrNull(page.NextCursor)}
	for _, sb := range page.Items {
		out.Items = append(out.Items, sandboxOf(sb))
	}
	return c.json(http.StatusOK, out)
}

func (s *Server) updateSandbox(c *call) error {
	id, err := c.sandboxID()
	if err != nil {
		return err
	}
	// Every lifecycle starts from the defaults; json fills one in only if the body has one.
	lifecycle := defaultLifecycle()
	in := UpdateSandbox{Lifecycle: &lifecycle}
	if err := c.decode(&in); err != nil {
		return err
	}
	check := &checker{schemas: s.schemas}
	check.metadata(in.Metadata)
	if err := check.err(); err != nil {
		return err
	}
	u := control.UpdateSandbox{Metadata: in.Metadata}
	if given, err := wire.ParseJSON(c.raw); err == nil && has(given, "lifecycle") {
		l := lifecycle.lifecycle()
		u.Lifecycle = &l
	}
	if u.IfMatch, err = ifMatch(c.r.Header); err != nil {
		return err
	}
	sb, err := c.svc().UpdateSandbox(c.ctx(), c.p, id, u)
	if err != nil {
		return err
	}
	c.Header().Set("Etag", etag(sb.Version))
	return c.json(http.StatusOK, sandboxOf(sb))
}

func has(v any, key string) bool {
	object, _ := v.(map[string]any)
	_, ok := object[key]
	return ok
}

// ifMatch returns the version of an If-Match header: an etag with or without its quotes; "*" is any version.
func ifMatch(h http.Header) (*int64, error) {
	value := strings.TrimSpace(h.Get("If-Match"))
	if value == "" || value == "*" {
		return nil, nil
	}
	n, err := strconv.ParseInt(strings.Trim(value, `"`), 10, 64)
	if err != nil || n < 0 {
		return nil, sandbox.Invalid("If-Match", "etag", "must be the etag of the sandbox")
	}
	return &n, nil
}

func (s *Server) deleteSandbox(c *call) error {
	id, err := c.sandboxID()
	if err != nil {
		return err
	}
	if err := c.noBody(); err != nil {
		return err
	}
	accepted, err := c.svc().DeleteSandbox(c.ctx(), c.p, id, c.idem)
	if err != nil {
		return err
	}
	return c.accepted(accepted, http.StatusOK)
}

func (s *Server) getOperation(c *call) error {
	id, err := sandbox.ParseOperationID(c.path["id"])
	if err != nil {
		return sandbox.Errorf(sandbox.CodeNotFound, "no such operation")
	}
	op, err := c.waitOperation(id, time.Duration(c.number("wait", 0))*time.Second)
	if err != nil {
		return err
	}
	return c.json(http.StatusOK, operationOf(op))
}

// metadata checks the limits that count bytes.
func (c *checker) metadata(m map[string]string) {
	const path = "metadata"
	if len(m) > sandbox.MaxMetadata {
		c.add(path, "max_properties", "must have at most %d entries", sandbox.MaxMetadata)
		return
	}
	for _, k := range sortedKeys(m) {
		switch {
		case k == "" || len(k) > sandbox.MaxMetadataKey:
			c.add(path, "key_length", "must have keys of 1 to %d bytes", sandbox.MaxMetadataKey)
		case len(m[k]) > sandbox.MaxMetadataValue:
			c.add(wire.Join(path, k), "max_length", "must be at most %d bytes", sandbox.MaxMetadataValue)
		case strings.IndexByte(k, 0) >= 0 || strings.IndexByte(m[k], 0) >= 0:
			c.add(wire.Join(path, k), "no_nul", "must not contain a NUL byte")
		}
	}
}

// env checks that every variable can be given to a process.
func (c *checker) env(path string, m map[string]string) {
	for _, k := range sortedKeys(m) {
		switch {
		case k == "" || strings.ContainsAny(k, "=\x00"):
			c.add(path, "name", "must have names that are not empty and hold neither '=' nor a NUL byte")
		case strings.IndexByte(m[k], 0) >= 0:
			c.add(wire.Join(path, k), "no_nul", "must not contain a NUL byte")
		case len(k)+1+len(m[k]) > sandbox.MaxArg:
			c.add(wire.Join(path, k), "max_length", "must be at most %d bytes with its name", sandbox.MaxArg)
		}
	}
}
