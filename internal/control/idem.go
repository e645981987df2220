package control

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/space-sandbox/space/internal/auth"
	"github.com/space-sandbox/space/internal/sandbox"
	"github.com/space-sandbox/space/internal/store"
)

// claim is what an idempotency key stands for, as stored: IDs only.
type claim struct {
	Sandbox   sandbox.ID          `json:"sandbox,omitempty"`
	Operation sandbox.OperationID `json:"operation,omitempty"`
	Process   sandbox.ProcessID   `json:"process,omitempty"`
	Key       sandbox.KeyID       `json:"key,omitempty"`
	// Running names the process of ours that runs the call; empty once it is done. Only Once has such calls.
	Running string `json:"running,omitempty"`
}

func idemScope(pr *auth.Principal, idem *Idem) string {
	return string(pr.KeyID) + " " + idem.Scope
}

// findClaim returns what the key stands for, nil if it is new, expired or not given; idempotency_conflict if it came
// with another body.
func (p *Plane) findClaim(ctx context.Context, tx store.Tx, pr *auth.Principal, idem *Idem) (*claim, error) {
	if idem == nil {
		return nil, nil //nolint:nilnil // no claim is no failure
	}
	e, err := tx.GetIdempotency(ctx, idemScope(pr, idem), idem.Key)
	if errors.Is(err, store.ErrNotFound) {
		return nil, nil //nolint:nilnil // see above
	}
	if err != nil {
		return nil, err
	}
	if !p.clock.Now().Before(e.ExpiresAt) {
		return nil, nil //nolint:nilnil // see above
	}
	if e.BodyHash != idem.BodyHash {
		return nil, sandbox.Errorf(sandbox.CodeIdempotencyConflict, "this Idempotency-Key was used with another request").
			WithRemediation("use a new key for a new request")
	}
	c := new(claim)
	if err := json.Unmarshal([]byte(e.Resource), c); err != nil {
		return nil, fmt.Errorf("stored idempotency entry is damaged: %w", err)
	}
	return c, nil
}

// putClaim records what the key stands for; no key, no record.
func (p *Plane) putClaim(ctx context.Context, tx store.Tx, pr *auth.Principal, idem *Idem, c claim) error {
	if idem == nil {
		return nil
	}
	b, err := json.Marshal(c)
	if err != nil {
		return err
	}
	now := p.now()
	return tx.InsertIdempotency(ctx, &store.Idempotency{
		Scope: idemScope(pr, idem), Key: idem.Key, BodyHash: idem.BodyHash, Resource: string(b),
		CreatedAt: now, ExpiresAt: now.Add(p.cfg.IdempotencyTTL),
	})
}

// dropClaim frees the key: the call had no effect.
func (p *Plane) dropClaim(ctx context.Context, tx store.Tx, pr *auth.Principal, idem *Idem) error {
	if idem == nil {
		return nil
	}
	return tx.RemoveIdempotency(ctx, idemScope(pr, idem), idem.Key)
}

// Once implements Service. A call that this process is still running answers conflict, retryable. Of a call that an
// earlier process was running when it died nobody knows whether it took effect: with idem.Repeatable it is run again,
// else the answer is conflict, not retryable.
func (p *Plane) Once(ctx context.Context, pr *auth.Principal, idem *Idem, fn func(context.Context) error) (replayed bool, err error) {
	if idem == nil {
		return false, fn(ctx)
	}
	err = p.update(ctx, func(tx store.Tx) (err error) {
		replayed, err = p.begin(ctx, tx, pr, idem)
		return err
	})
	if err != nil || replayed {
		return replayed, err
	}
	done := false
	defer func() { p.settle(ctx, pr, idem, done) }() // also when fn panics: the key must not stay taken
	if err := fn(ctx); err != nil {
		return false, err
	}
	done = true
	return false, nil
}

// begin claims a key for a call of Once, or tells that the call was done before.
func (p *Plane) begin(ctx context.Context, tx store.Tx, pr *auth.Principal, idem *Idem) (replayed bool, err error) {
	c, err := p.findClaim(ctx, tx, pr, idem)
	switch {
	case err != nil:
		return false, err
	case c == nil:
	case c.Running == "":
		return true, nil
	case c.Running == p.instance:
		e := sandbox.Errorf(sandbox.CodeConflict, "the first call with this Idempotency-Key is still running")
		e.Retryable = true
		return false, e
	case !idem.Repeatable:
		return false, sandbox.Errorf(sandbox.CodeConflict, "the server was restarted during the first call with this Idempotency-Key; whether it took effect is not known").
			WithRemediation("look at the state, then send the call with a new key if it is still needed")
	default:
		if err := p.dropClaim(ctx, tx, pr, idem); err != nil {
			return false, err
		}
	}
	return false, p.putClaim(ctx, tx, pr, idem, claim{Running: p.instance})
}

// settle ends a claim of Once although the caller may have gone: kept as done, or freed for another try.
func (p *Plane) settle(ctx context.Context, pr *auth.Principal, idem *Idem, done bool) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), afterwards)
	defer cancel()
	err := p.update(ctx, func(tx store.Tx) error {
		if err := p.dropClaim(ctx, tx, pr, idem); err != nil || !done {
			return err
		}
		return p.putClaim(ctx, tx, pr, idem, claim{})
	})
	if err != nil {
		// The answer of the call itself is what the caller needs; the key answers conflict until it expires.
		p.log.ErrorContext(ctx, "idempotency key stays open", "error", err)
	}
}
