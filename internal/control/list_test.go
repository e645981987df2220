package control

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	"github.com/space-sandbox/space/internal/auth"
	agentv1 "github.com/space-sandbox/space/internal/gen/space/agent/v1"
	nodev1 "github.com/space-sandbox/space/internal/gen/space/node/v1"
	"github.com/space-sandbox/space/internal/sandbox"
)

func (e *env) listIDs(pr *auth.Principal, q ListSandboxes) (ids []sandbox.ID) {
	e.t.Helper()
	for {
		page, err := e.ListSandboxes(e.t.Context(), pr, q)
		if err != nil {
			e.t.Fatal(err)
		}
		for _, s := range page.Items {
			ids = append(ids, s.ID)
		}
		if q.Cursor = page.NextCursor; q.Cursor == "" {
			return ids
		}
	}
}

func TestListSandboxes(t *testing.T) {
	e := newEnv(t)
	var all []sandbox.ID
	for i := range 5 {
		all = append(all, e.running(func(r *CreateSandbox) { r.Metadata = map[string]string{"n": fmt.Sprint(i % 2)} }).ID)
	}
	gone := e.running()
	e.wait(e.delete(gone.ID).Operation.ID)
	_, limited := e.key(func(k *sandbox.APIKey) { k.Metadata = map[string]string{"n": "1"} })
	_, few := e.key(func(k *sandbox.APIKey) { k.SandboxIDs = []sandbox.ID{all[2], gone.ID} })
	_, foreign := e.key(func(k *sandbox.APIKey) { k.ProjectID = "other" })
	backwards := []sandbox.ID{all[4], all[3], all[2], all[1], all[0]}
	for name, test := range map[string]struct {
		pr   *auth.Principal
		q    ListSandboxes
		want []sandbox.ID
	}{
		"all":           {e.admin, ListSandboxes{}, all},
		"pages":         {e.admin, ListSandboxes{Limit: 2}, all},
		"full pages":    {e.admin, ListSandboxes{Limit: 5}, all},
		"backwards":     {e.admin, ListSandboxes{Limit: 2, Descending: true}, backwards},
		"state":         {e.admin, ListSandboxes{States: []sandbox.State{sandbox.StateFailed}}, nil},
		"deleted":       {e.admin, ListSandboxes{States: []sandbox.State{sandbox.StateDeleted}}, []sandbox.ID{gone.ID}},
		"template":      {e.admin, ListSandboxes{Template: "other"}, nil},
		"metadata":      {e.admin, ListSandboxes{Metadata: map[string]string{"n": "1"}, Limit: 1}, []sandbox.ID{all[1], all[3]}},
		"limited":       {limited, ListSandboxes{}, []sandbox.ID{all[1], all[3]}},
		"limited, same": {limited, ListSandboxes{Metadata: map[string]string{"n": "1"}}, []sandbox.ID{all[1], all[3]}},
		"outside":       {limited, ListSandboxes{Metadata: map[string]string{"n": "0"}}, nil},
		"few":           {few, ListSandboxes{}, []sandbox.ID{all[2]}},
		"foreign":       {foreign, ListSandboxes{}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			sub := &env{Plane: e.Plane, t: t}
			if got := sub.listIDs(test.pr, test.q); fmt.Sprint(got) != fmt.Sprint(test.want) {
				t.Errorf("got %v, want %v", got, test.want)
			}
		})
	}
	_, err := e.ListSandboxes(t.Context(), e.principal(sandbox.ScopeFilesRead), ListSandboxes{})
	e.wantCode(err, sandbox.CodeForbidden)
	_, err = e.ListSandboxes(t.Context(), e.admin, ListSandboxes{Cursor: "x"})
	e.wantCode(err, sandbox.CodeInvalidRequest)
}

func TestCursor(t *testing.T) {
	s := &sandbox.Sandbox{ID: sandbox.NewID(), CreatedAt: time.Now().UTC()}
	c, err := decodeCursor(encodeCursor(s))
	if err != nil || c.ID != string(s.ID) || !c.CreatedAt.Equal(s.CreatedAt) {
		t.Errorf("%+v, %v", c, err)
	}
	if c, err := decodeCursor(""); err != nil || !c.IsZero() {
		t.Errorf("%+v, %v", c, err)
	}
	for _, text := range []string{"a", "====", base64.RawURLEncoding.EncodeToString([]byte("null")),
		base64.RawURLEncoding.EncodeToString([]byte(`{"t":1,"id":"../x"}`))} {
		if _, err := decodeCursor(text); sandbox.CodeOf(err) != sandbox.CodeInvalidRequest {
			t.Errorf("%q: %v", text, err)
		}
	}
}

func FuzzCursor(f *testing.F) {
	f.Add(encodeCursor(&sandbox.Sandbox{ID: sandbox.NewID()}))
	f.Add("")
	f.Add("eyJ0IjoxLCJpZCI6ImkifQ")
	f.Add("bnVsbA")
	f.Fuzz(func(t *testing.T, text string) {
		c, err := decodeCursor(text)
		if err != nil {
			if sandbox.CodeOf(err) != sandbox.CodeInvalidRequest {
				t.Fatalf("%q: %v", text, err)
			}
			return
		}
		if _, err := sandbox.ParseID(c.ID); err != nil && text != "" {
			t.Fatalf("%q gave the ID %q", text, c.ID)
		}
	})
}

func TestGetOperationIsWithinLimits(t *testing.T) {
	e := newEnv(t)
	acc := e.create()
	e.wait(acc.Operation.ID)
	_, limited := e.key(func(k *sandbox.APIKey) { k.Metadata = map[string]string{"team": "x"} })
	_, foreign := e.key(func(k *sandbox.APIKey) { k.ProjectID = "other" })
	for _, pr := range []*auth.Principal{limited, foreign} {
		_, err := e.GetOperation(t.Context(), pr, acc.Operation.ID, 0)
		e.wantCode(err, sandbox.CodeNotFound)
		_, err = e.GetSandbox(t.Context(), pr, acc.Sandbox.ID)
		e.wantCode(err, sandbox.CodeNotFound)
		_, err = e.Guest(t.Context(), pr, acc.Sandbox.ID, sandbox.ScopeFilesRead, GuestUse{})
		e.wantCode(err, sandbox.CodeNotFound)
	}
	_, err := e.GetOperation(t.Context(), e.principal(sandbox.ScopeFilesRead), acc.Operation.ID, 0)
	e.wantCode(err, sandbox.CodeForbidden)
	if _, err := e.GetOperation(t.Context(), e.principal(sandbox.ScopeSandboxesWrite), acc.Operation.ID, 0); err != nil {
		t.Errorf("who may write may see the operation: %v", err)
	}
	_, err = e.GetOperation(t.Context(), e.admin, sandbox.NewOperationID(), 0)
	e.wantCode(err, sandbox.CodeNotFound)
}

func TestKeyLimitsStampWhatTheyCreate(t *testing.T) {
	e := newEnv(t)
	ctx := t.Context()
	_, limited := e.key(func(k *sandbox.APIKey) { k.Metadata = map[string]string{"team": "x"} })
	_, few := e.key(func(k *sandbox.APIKey) { k.SandboxIDs = []sandbox.ID{sandbox.NewID()} })
	_, err := e.CreateSandbox(ctx, few, CreateSandbox{Template: "base"}, nil)
	e.wantCode(err, sandbox.CodeForbidden)
	_, err = e.CreateSandbox(ctx, limited, CreateSandbox{Template: "base", Metadata: map[string]string{"team": "y"}}, nil)
	e.wantCode(err, sandbox.CodeForbidden)
	acc, err := e.CreateSandbox(ctx, limited, CreateSandbox{Template: "base", Metadata: map[string]string{"a": "b"}}, nil)
	if err != nil || acc.Sandbox.Metadata["team"] != "x" || acc.Sandbox.Metadata["a"] != "b" {
		t.Fatalf("%+v, %v", acc, err)
	}
	e.wait(acc.Operation.ID)
	_, err = e.UpdateSandbox(ctx, limited, acc.Sandbox.ID, UpdateSandbox{Metadata: map[string]string{"team": "y"}})
	e.wantCode(err, sandbox.CodeForbidden)
	s, err := e.UpdateSandbox(ctx, limited, acc.Sandbox.ID, UpdateSandbox{Metadata: map[string]string{}})
	if err != nil || s.Metadata["team"] != "x" || len(s.Metadata) != 1 {
		t.Errorf("%+v, %v", s, err)
	}
}

func TestUpdateSandbox(t *testing.T) {
	e := newEnv(t)
	ctx := t.Context()
	s := e.running(func(r *CreateSandbox) { r.Metadata = map[string]string{"a": "1"} })
	wrong := s.Version + 1
	_, err := e.UpdateSandbox(ctx, e.admin, s.ID, UpdateSandbox{IfMatch: &wrong})
	e.wantCode(err, sandbox.CodeFailedPrecondition)
	day := int64(86400)
	got, err := e.UpdateSandbox(ctx, e.admin, s.ID, UpdateSandbox{IfMatch: &s.Version, Lifecycle: &sandbox.Lifecycle{MaxLifetimeS: &day}})
	if err != nil || got.Version != s.Version+1 || *got.Lifecycle.MaxLifetimeS != day || got.Metadata["a"] != "1" || got.Lifecycle.OnMaxLifetime != "delete" {
		t.Fatalf("%+v, %v", got, err)
	}
	_, err = e.UpdateSandbox(ctx, e.admin, s.ID, UpdateSandbox{IfMatch: &s.Version})
	e.wantCode(err, sandbox.CodeFailedPrecondition)
	got, err = e.UpdateSandbox(ctx, e.admin, s.ID, UpdateSandbox{Metadata: map[string]string{"b": "2"}})
	if err != nil || len(got.Metadata) != 1 || got.Metadata["b"] != "2" || *got.Lifecycle.MaxLifetimeS != day {
		t.Errorf("%+v, %v", got, err)
	}
	_, err = e.UpdateSandbox(ctx, e.admin, s.ID, UpdateSandbox{Lifecycle: &sandbox.Lifecycle{OnMaxLifetime: "suspend"}})
	if got := e.wantCode(err, sandbox.CodeFailedPrecondition); got.Details.Remediation == "" {
		t.Error("no remediation")
	}
	_, err = e.UpdateSandbox(ctx, e.principal(sandbox.ScopeSandboxesRead), s.ID, UpdateSandbox{})
	e.wantCode(err, sandbox.CodeForbidden)
	_, err = e.UpdateSandbox(ctx, e.admin, sandbox.NewID(), UpdateSandbox{})
	e.wantCode(err, sandbox.CodeNotFound)
}

func withDetail(t *testing.T, code connect.Code, d proto.Message) error {
	t.Helper()
	err := connect.NewError(code, errors.New("guest text"))
	detail, derr := connect.NewErrorDetail(d)
	if derr != nil {
		t.Fatal(derr)
	}
	err.AddDetail(detail)
	return fmt.Errorf("wrapped: %w", err)
}

func TestGuestErrorOfFiles(t *testing.T) {
	type fe = agentv1.FileError
	for _, test := range []struct {
		detail    *fe
		code      sandbox.Code
		field     string
		retryable bool
	}{
		{&fe{Reason: agentv1.FileErrorReason_FILE_ERROR_REASON_NOT_FOUND, Field: "path"}, sandbox.CodeNotFound, "", false},
		{&fe{Reason: agentv1.FileErrorReason_FILE_ERROR_REASON_NOT_FOUND, Field: "cwd"}, sandbox.CodeInvalidRequest, "spec.cwd", false},
		{&fe{Reason: agentv1.FileErrorReason_FILE_ERROR_REASON_EXISTS, Field: "to"}, sandbox.CodeConflict, "", false},
		{&fe{Reason: agentv1.FileErrorReason_FILE_ERROR_REASON_PERMISSION, Field: "path"}, sandbox.CodeForbidden, "", false},
		{&fe{Reason: agentv1.FileErrorReason_FILE_ERROR_REASON_NOT_DIRECTORY, Field: "from"}, sandbox.CodeInvalidRequest, "spec.from", false},
		{&fe{Reason: agentv1.FileErrorReason_FILE_ERROR_REASON_IS_DIRECTORY}, sandbox.CodeInvalidRequest, "spec.path", false},
		{&fe{Reason: agentv1.FileErrorReason_FILE_ERROR_REASON_NOT_EMPTY}, sandbox.CodeConflict, "", false},
		{&fe{Reason: agentv1.FileErrorReason_FILE_ERROR_REASON_INVALID_PATH, Field: "<script>"}, sandbox.CodeInvalidRequest, "spec.path", false},
		{&fe{Reason: agentv1.FileErrorReason_FILE_ERROR_REASON_NO_SPACE}, sandbox.CodeFailedPrecondition, "", false},
		{&fe{Reason: agentv1.FileErrorReason_FILE_ERROR_REASON_READ_ONLY}, sandbox.CodeFailedPrecondition, "", false},
		{&fe{Reason: agentv1.FileErrorReason_FILE_ERROR_REASON_TOO_MANY_OPEN}, sandbox.CodeServiceUnavailable, "", true},
		{&fe{Reason: agentv1.FileErrorReason_FILE_ERROR_REASON_UNKNOWN_USER, Field: "user"}, sandbox.CodeInvalidRequest, "spec.user", false},
		{&fe{}, sandbox.CodeInvalidRequest, "", false}, // nothing said: the code decides
	} {
		t.Run(test.detail.Reason.String()+" "+test.detail.Field, func(t *testing.T) {
			e := (&env{t: t}).wantCode(GuestError(withDetail(t, connect.CodeInvalidArgument, test.detail), "spec."), test.code)
			if e.Retryable != test.retryable || strings.Contains(e.Message, "guest text") || strings.Contains(e.Message, "script") {
				t.Errorf("%+v", e)
			}
			if test.field != "" && (len(e.Details.Violations) != 1 || e.Details.Violations[0].Field != test.field) {
				t.Errorf("violations %+v", e.Details.Violations)
			}
			var inner *connect.Error
			if !errors.As(&e, &inner) {
				t.Error("the cause is lost")
			}
		})
	}
}

func TestGuestErrorOfCodes(t *testing.T) {
	for code, want := range map[connect.Code]sandbox.Code{
		connect.CodeNotFound: sandbox.CodeNotFound, connect.CodeAlreadyExists: sandbox.CodeConflict,
		connect.CodeInvalidArgument: sandbox.CodeInvalidRequest, connect.CodeOutOfRange: sandbox.CodeInvalidRequest,
		connect.CodePermissionDenied: sandbox.CodeForbidden, connect.CodeFailedPrecondition: sandbox.CodeConflict,
		connect.CodeAborted: sandbox.CodeConflict, connect.CodeResourceExhausted: sandbox.CodeServiceUnavailable,
		connect.CodeUnimplemented: sandbox.CodeFailedPrecondition, connect.CodeUnavailable: sandbox.CodeServiceUnavailable,
		connect.CodeDeadlineExceeded: sandbox.CodeServiceUnavailable, connect.CodeCanceled: sandbox.CodeServiceUnavailable,
		connect.CodeInternal: sandbox.CodeInternal, connect.CodeUnknown: sandbox.CodeInternal,
		connect.CodeDataLoss: sandbox.CodeInternal, connect.CodeUnauthenticated: sandbox.CodeInternal,
	} {
		// A detail that is not ours changes nothing.
		for _, err := range []error{connect.NewError(code, errors.New("guest text")), withDetail(t, code, &nodev1.Progress{})} {
			if e := (&env{t: t}).wantCode(GuestError(err, ""), want); strings.Contains(e.Message, "guest text") {
				t.Errorf("%v: the guest speaks: %q", code, e.Message)
			}
		}
	}
	if GuestError(nil, "") != nil {
		t.Error("no error became one")
	}
	typed := sandbox.Errorf(sandbox.CodeRateLimited, "x")
	if !errors.Is(GuestError(typed, ""), typed) {
		t.Error("a typed error was changed")
	}
	for _, err := range []error{context.DeadlineExceeded, context.Canceled} {
		(&env{t: t}).wantCode(GuestError(err, ""), sandbox.CodeServiceUnavailable)
	}
}
