package control

import (
	"context"
	"errors"

	"connectrpc.com/connect"

	"github.com/space-sandbox/space/internal/auth"
	nodev1 "github.com/space-sandbox/space/internal/gen/space/node/v1"
	"github.com/space-sandbox/space/internal/sandbox"
	"github.com/space-sandbox/space/internal/store"
)

// CreateCommand implements Service. The process gets its ID here, and the ID is stored with the session before the
// guest hears of it: whoever repeats the call, after a lost answer or a crash, creates the same process again.
func (p *Plane) CreateCommand(ctx context.Context, pr *auth.Principal, id sandbox.ID, req CreateCommand, idem *Idem) (NewCommand, error) {
	g, err := p.Guest(ctx, pr, id, sandbox.ScopeSandboxesExec, GuestUse{Active: true})
	if err != nil {
		return NewCommand{}, err
	}
	session, err := p.openSession(ctx, pr, id, sandbox.NewProcessID(), idem)
	if err != nil {
		return NewCommand{}, err
	}
	call, cancel := context.WithTimeout(ctx, processCall)
	defer cancel()
	res, err := g.Processes.CreateProcess(call, connect.NewRequest(&nodev1.CreateProcessRequest{
		ProcessId: string(session.Session.ProcessID), Spec: req.Spec, OutputCapBytes: req.OutputCap, StartNow: req.StartNow,
	}))
	if err != nil {
		p.closeSession(ctx, pr, session, idem, final(err))
		return NewCommand{}, GuestError(err, "")
	}
	return NewCommand{Process: res.Msg.GetProcess(), NewSession: session}, nil
}

// CreateSession implements Service.
func (p *Plane) CreateSession(ctx context.Context, pr *auth.Principal, id sandbox.ID, pid sandbox.ProcessID, idem *Idem) (NewSession, error) {
	g, err := p.Guest(ctx, pr, id, sandbox.ScopeSandboxesExec, GuestUse{ReadOnly: true})
	if err != nil {
		return NewSession{}, err
	}
	call, cancel := context.WithTimeout(ctx, processCall)
	defer cancel()
	if _, err := g.Processes.GetProcess(call, connect.NewRequest(&nodev1.GetProcessRequest{ProcessId: string(pid)})); err != nil {
		return NewSession{}, GuestError(err, "")
	}
	return p.openSession(ctx, pr, id, pid, idem)
}

// openSession stores a session of a process, or of the process that the idempotency key already stands for. The token
// of a replay is a fresh one: the first is not stored anywhere.
func (p *Plane) openSession(ctx context.Context, pr *auth.Principal, id sandbox.ID, pid sandbox.ProcessID, idem *Idem) (NewSession, error) {
	var out NewSession
	err := p.update(ctx, func(tx store.Tx) error {
		c, err := p.findClaim(ctx, tx, pr, idem)
		if err != nil {
			return err
		}
		out = NewSession{Token: auth.NewToken(), Replayed: c != nil}
		now := p.now()
		out.Session = &sandbox.Session{
			ID: sandbox.NewSessionID(), SandboxID: id, ProcessID: pid, TokenHash: auth.Hash(out.Token),
			KeyID: pr.KeyID, CreatedAt: now, ExpiresAt: now.Add(p.cfg.SessionTTL),
		}
		if c != nil {
			out.Session.ProcessID = c.Process
		} else if err := p.putClaim(ctx, tx, pr, idem, claim{Sandbox: id, Process: pid}); err != nil {
			return err
		}
		err = tx.InsertSession(ctx, out.Session)
		if errors.Is(err, store.ErrNotFound) {
			return errNoSandbox().WithCause(err) // deleted and purged meanwhile
		}
		return err
	})
	return out, err
}

// closeSession removes a session whose token nobody got. refused tells that the guest made no process for it; then
// the idempotency key is free again too. Otherwise it keeps standing for the process that may be there.
func (p *Plane) closeSession(ctx context.Context, pr *auth.Principal, s NewSession, idem *Idem, refused bool) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), afterwards)
	defer cancel()
	err := p.update(ctx, func(tx store.Tx) error {
		if err := tx.DeleteSession(ctx, s.Session.ID); err != nil || !refused || s.Replayed {
			return err
		}
		return p.dropClaim(ctx, tx, pr, idem)
	})
	if err != nil {
		p.log.WarnContext(ctx, "session of a refused command stays until it expires", "session", string(s.Session.ID), "error", err)
	}
}

// Authenticate implements Service.
func (p *Plane) Authenticate(ctx context.Context, key string) (*auth.Principal, error) {
	return p.keys.Authenticate(ctx, key)
}

// RevocationOf implements Service.
func (p *Plane) RevocationOf(ctx context.Context, key sandbox.KeyID) <-chan struct{} {
	return p.keys.RevocationOf(ctx, key)
}

// AuthenticateSession implements Service. All reasons to refuse look the same.
func (p *Plane) AuthenticateSession(ctx context.Context, id sandbox.SessionID, token string) (*sandbox.Session, error) {
	var s *sandbox.Session
	err := p.view(ctx, func(tx store.Tx) (err error) {
		s, err = tx.GetSession(ctx, id)
		return err
	})
	refused := sandbox.Errorf(sandbox.CodeUnauthorized, "the session is unknown, expired or revoked, or the token is not its own").
		WithRemediation("make a new session of the process")
	if sandbox.CodeOf(err) == sandbox.CodeNotFound {
		return nil, refused
	}
	if err != nil {
		return nil, err
	}
	if !auth.HashEqual(token, s.TokenHash) || !p.clock.Now().Before(s.ExpiresAt) {
		return nil, refused
	}
	if _, err := p.keys.Check(ctx, s.KeyID); sandbox.CodeOf(err) == sandbox.CodeUnauthorized {
		return nil, refused
	} else if err != nil {
		return nil, err
	}
	return s, nil
}
