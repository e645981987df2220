package control

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"time"

	"github.com/space-sandbox/space/internal/auth"
	"github.com/space-sandbox/space/internal/sandbox"
	"github.com/space-sandbox/space/internal/store"
)

func errNoSandbox() *sandbox.Error {
	return sandbox.Errorf(sandbox.CodeNotFound, "no sandbox has this ID")
}

// visible loads a sandbox that the caller may see and that is not deleted; anything else is not found.
func visible(ctx context.Context, tx store.Tx, pr *auth.Principal, id sandbox.ID) (*sandbox.Sandbox, error) {
	s, err := tx.GetSandbox(ctx, id)
	if errors.Is(err, store.ErrNotFound) {
		return nil, errNoSandbox().WithCause(err)
	}
	if err != nil {
		return nil, err
	}
	if s.State == sandbox.StateDeleted || !pr.MaySee(s) {
		return nil, errNoSandbox()
	}
	return s, nil
}

// GetSandbox implements Service.
func (p *Plane) GetSandbox(ctx context.Context, pr *auth.Principal, id sandbox.ID) (*sandbox.Sandbox, error) {
	if err := pr.Require(sandbox.ScopeSandboxesRead); err != nil {
		return nil, err
	}
	return p.load(ctx, pr, id)
}

func (p *Plane) load(ctx context.Context, pr *auth.Principal, id sandbox.ID) (s *sandbox.Sandbox, err error) {
	err = p.view(ctx, func(tx store.Tx) (err error) {
		s, err = visible(ctx, tx, pr, id)
		return err
	})
	if err != nil {
		return nil, err
	}
	p.activity.overlay(s)
	return s, nil
}

// cursor is what NextCursor holds.
type cursor struct {
	CreatedAt int64      `json:"t"`
	ID        sandbox.ID `json:"id"`
}

func encodeCursor(s *sandbox.Sandbox) string {
	b, _ := json.Marshal(cursor{CreatedAt: s.CreatedAt.UnixNano(), ID: s.ID}) // two plain fields: cannot fail
	return base64.RawURLEncoding.EncodeToString(b)
}

func decodeCursor(text string) (store.Cursor, error) {
	if text == "" {
		return store.Cursor{}, nil
	}
	invalid := sandbox.Invalid("cursor", "format", "is not a cursor of this list")
	b, err := base64.RawURLEncoding.Strict().DecodeString(text)
	if err != nil {
		return store.Cursor{}, invalid
	}
	var c cursor
	if err := json.Unmarshal(b, &c); err != nil {
		return store.Cursor{}, invalid
	}
	if _, err := sandbox.ParseID(string(c.ID)); err != nil {
		return store.Cursor{}, invalid
	}
	return store.Cursor{CreatedAt: time.Unix(0, c.CreatedAt).UTC(), ID: string(c.ID)}, nil
}

// ListSandboxes implements Service.
func (p *Plane) ListSandboxes(ctx context.Context, pr *auth.Principal, q ListSandboxes) (Page[*sandbox.Sandbox], error) {
	var page Page[*sandbox.Sandbox]
	if err := pr.Require(sandbox.ScopeSandboxesRead); err != nil {
		return page, err
	}
	after, err := decodeCursor(q.Cursor)
	if err != nil {
		return page, err
	}
	metadata := map[string]string{}
	for _, m := range []map[string]string{pr.Metadata, q.Metadata} {
		for k, v := range m {
			if old, ok := metadata[k]; ok && old != v {
				return page, nil // outside the limit of the key: nothing
			}
			metadata[k] = v
		}
	}
	limit := pageLimit(q.Limit)
	err = p.view(ctx, func(tx store.Tx) (err error) {
		page.Items, err = tx.ListSandboxes(ctx, store.SandboxQuery{
			ProjectID: pr.ProjectID, IDs: pr.SandboxIDs, States: q.States, Template: q.Template, Metadata: metadata,
			Descending: q.Descending, After: after, Limit: limit + 1, // one more tells whether there is a next page
		})
		return err
	})
	if err != nil {
		return Page[*sandbox.Sandbox]{}, err
	}
	if len(page.Items) > limit {
		page.Items = page.Items[:limit]
		page.NextCursor = encodeCursor(page.Items[limit-1])
	}
	for _, s := range page.Items {
		p.activity.overlay(s)
	}
	return page, nil
}

func pageLimit(n int) int {
	if n <= 0 {
		return sandbox.DefaultPageLimit
	}
	return min(n, sandbox.MaxPageLimit)
}

// UpdateSandbox implements Service. Metadata replaces all of it; what the key is limited to stays in any case.
func (p *Plane) UpdateSandbox(ctx context.Context, pr *auth.Principal, id sandbox.ID, u UpdateSandbox) (*sandbox.Sandbox, error) {
	if err := pr.Require(sandbox.ScopeSandboxesWrite); err != nil {
		return nil, err
	}
	var lifecycle *sandbox.Lifecycle
	if u.Lifecycle != nil {
		l, err := checkLifecycle(*u.Lifecycle)
		if err != nil {
			return nil, err
		}
		lifecycle = &l
	}
	var s *sandbox.Sandbox
	err := p.update(ctx, func(tx store.Tx) (err error) {
		if s, err = visible(ctx, tx, pr, id); err != nil {
			return err
		}
		if u.IfMatch != nil && *u.IfMatch != s.Version {
			return sandbox.Errorf(sandbox.CodeFailedPrecondition, "the sandbox was changed since it was read").
				WithRemediation("read it again and send its new etag")
		}
		if s.State == sandbox.StateDeleting {
			return sandbox.ConflictState("update", s.State, false)
		}
		if u.Metadata != nil {
			if s.Metadata, err = stamp(pr, u.Metadata); err != nil {
				return err
			}
		}
		if lifecycle != nil {
			s.Lifecycle = *lifecycle
		}
		s.UpdatedAt = p.now()
		return tx.UpdateSandbox(ctx, s)
	})
	if err != nil {
		return nil, err
	}
	p.timers.set(s, p.clock.Now())
	p.activity.overlay(s)
	return s, nil
}

// DeleteSandbox implements Service.
func (p *Plane) DeleteSandbox(ctx context.Context, pr *auth.Principal, id sandbox.ID, idem *Idem) (Accepted, error) {
	if err := pr.Require(sandbox.ScopeSandboxesWrite); err != nil {
		return Accepted{}, err
	}
	var (
		acc   Accepted
		ended sandbox.OperationID
	)
	err := p.update(ctx, func(tx store.Tx) (err error) {
		if acc, err = p.replay(ctx, tx, pr, idem); err != nil || acc.Replayed {
			return err
		}
		s, err := visible(ctx, tx, pr, id)
		if err != nil {
			return err
		}
		if acc, ended, err = p.intendDelete(ctx, tx, s, ""); err != nil {
			return err
		}
		return p.putClaim(ctx, tx, pr, idem, claim{Sandbox: s.ID, Operation: acc.Operation.ID})
	})
	if err != nil {
		return Accepted{}, err
	}
	if !acc.Replayed {
		p.deleting(acc, ended)
	}
	p.ops.overlay(acc.Operation)
	return acc, nil
}

// intendDelete writes the intent, or finds the one there is. It ends the operation that was under way, whose ID it
// returns.
func (p *Plane) intendDelete(ctx context.Context, tx store.Tx, s *sandbox.Sandbox, reason string) (Accepted, sandbox.OperationID, error) {
	var ended sandbox.OperationID
	if s.OperationID != "" {
		op, err := tx.GetOperation(ctx, s.OperationID)
		if err != nil && !errors.Is(err, store.ErrNotFound) {
			return Accepted{}, "", err
		}
		if err == nil && !op.State.Ended() {
			if op.Kind == sandbox.OpDelete {
				return Accepted{Sandbox: s, Operation: op}, "", nil
			}
			op.State, op.EndedAt = sandbox.OpFailed, p.now()
			op.Error = sandbox.Errorf(sandbox.CodeConflict, "the sandbox was deleted meanwhile").Record()
			if err := tx.UpdateOperation(ctx, op); err != nil {
				return Accepted{}, "", err
			}
			ended = op.ID
		}
	}
	op := p.newOperation(sandbox.OpDelete, s)
	s.State, s.StateReason, s.OperationID, s.UpdatedAt = sandbox.StateDeleting, reason, op.ID, p.now()
	if err := tx.UpdateSandbox(ctx, s); err != nil {
		return Accepted{}, "", err
	}
	return Accepted{Sandbox: s, Operation: op}, ended, tx.InsertOperation(ctx, op)
}

// deleting acts on a delete that was written.
func (p *Plane) deleting(acc Accepted, ended sandbox.OperationID) {
	if ended != "" {
		p.ops.end(ended)
		p.supersede(acc.Sandbox.ID)
		return
	}
	p.poke(acc.Sandbox.ID)
}

// bury makes s a tombstone. What may be secret goes at once, the rest with the purge.
func bury(s *sandbox.Sandbox, now time.Time) {
	s.State, s.StateReason, s.OperationID, s.Env = sandbox.StateDeleted, "", "", nil
	s.DeletedAt, s.UpdatedAt = now, now
}
