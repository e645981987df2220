package api

import (
	"net/http"
	"time"

	"github.com/space-sandbox/space/internal/control"
	"github.com/space-sandbox/space/internal/sandbox"
)

func (s *Server) listTemplates(c *call) error {
	list, err := c.svc().ListTemplates(c.ctx(), c.p)
	if err != nil {
		return err
	}
	out := TemplatePage{Items: make([]*Template, 0, len(list))}
	for _, t := range list {
		out.Items = append(out.Items, templateOf(t))
	}
	return c.json(http.StatusOK, out)
}

func (s *Server) getTemplate(c *call) error {
	t, err := c.svc().GetTemplate(c.ctx(), c.p, c.path["name"])
	if err != nil {
		return err
	}
	return c.json(http.StatusOK, templateOf(t))
}

func (s *Server) createKey(c *call) error {
	var in CreateKey
	if err := c.decode(&in); err != nil {
		return err
	}
	req := control.CreateKey{Name: in.Name, Scopes: in.Scopes, Metadata: in.Metadata}
	check := &checker{schemas: s.schemas}
	check.metadata(in.Metadata)
	check.noNUL("name", in.Name)
	if in.ExpiresAt != nil {
		t, err := time.Parse(time.RFC3339Nano, *in.ExpiresAt)
		if err != nil || !t.After(time.Now()) {
			check.add("expires_at", "future", "must be in the future")
		}
		req.ExpiresAt = t
	}
	for i, text := range in.SandboxIDs {
		id, err := sandbox.ParseID(text)
		if err != nil {
			check.add(indexed("sandbox_ids", i), "id", "must be a sandbox ID")
		}
		req.SandboxIDs = append(req.SandboxIDs, id)
	}
	if err := check.err(); err != nil {
		return err
	}
	created, err := c.svc().CreateKey(c.ctx(), c.p, req, c.idem)
	if err != nil {
		return err
	}
	c.replayed(created.Replayed)
	return c.json(http.StatusCreated, NewKey{KeyRecord: *keyOf(created.Key), Key: textOrNull(created.Secret)})
}

func (s *Server) listKeys(c *call) error {
	var after sandbox.KeyID
	if cursor := c.query.Get("cursor"); cursor != "" {
		id, err := sandbox.ParseKeyID(cursor)
		if err != nil {
			return sandbox.Invalid("cursor", "cursor", "must be the next_cursor of a page before")
		}
		after = id
	}
	page, err := c.svc().ListKeys(c.ctx(), c.p, after, c.number("limit", sandbox.DefaultPageLimit))
	if err != nil {
		return err
	}
	out := KeyPage{Items: make([]*KeyRecord, 0, len(page.Items)), NextCursor: textOrNull(page.NextCursor)}
	for _, k := range page.Items {
		out.Items = append(out.Items, keyOf(k))
	}
	return c.json(http.StatusOK, out)
}

// revokeKey needs no record of its Idempotency-Key: revoking twice is revoking once.
func (s *Server) revokeKey(c *call) error {
	id, err := sandbox.ParseKeyID(c.path["id"])
	if err != nil {
		return sandbox.Errorf(sandbox.CodeNotFound, "no such API key")
	}
	if err := c.noBody(); err != nil {
		return err
	}
	key, err := c.svc().RevokeKey(c.ctx(), c.p, id)
	if err != nil {
		return err
	}
	return c.json(http.StatusOK, keyOf(key))
}
