package auth

import (
	"slices"

	"github.com/space-sandbox/space/internal/sandbox"
)

// Principal is who a request acts for: the API key it presented, with what that key may do.
type Principal struct {
	KeyID     sandbox.KeyID
	ProjectID string
	Scopes    []string
	// SandboxIDs and Metadata, if not empty, limit the key to these sandboxes, or to sandboxes that carry all of
	// this metadata. What lies outside the limit is not found.
	SandboxIDs []sandbox.ID
	Metadata   map[string]string
}

// Require returns a forbidden error that names scope, unless p has it.
func (p *Principal) Require(scope string) error {
	if slices.Contains(p.Scopes, scope) {
		return nil
	}
	e := sandbox.Errorf(sandbox.CodeForbidden, "this API key lacks the scope %s", scope)
	e.Details.RequiredScope = scope
	return e.WithRemediation("use a key that has this scope, or make one: space key create --scope " + scope)
}

// MaySee reports whether s is in p's project and within the limits of its key.
func (p *Principal) MaySee(s *sandbox.Sandbox) bool {
	if s.ProjectID != p.ProjectID {
		return false
	}
	if len(p.SandboxIDs) > 0 && !slices.Contains(p.SandboxIDs, s.ID) {
		return false
	}
	for k, v := range p.Metadata {
		if got, ok := s.Metadata[k]; !ok || got != v {
			return false
		}
	}
	return true
}
