package sandbox

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
	"testing"
)

func TestIDsParseWhatTheyMake(t *testing.T) {
	seen := map[string]bool{}
	for range 1000 {
		id := NewID()
		if got, err := ParseID(string(id)); err != nil || got != id {
			t.Fatalf("%q: %v", id, err)
		}
		if seen[string(id)] {
			t.Fatalf("%q came twice", id)
		}
		seen[string(id)] = true
	}
	checks := []error{
		second(ParseOperationID(string(NewOperationID()))),
		second(ParseProcessID(string(NewProcessID()))),
		second(ParseSessionID(string(NewSessionID()))),
		second(ParseKeyID(string(NewKeyID()))),
	}
	if err := errors.Join(checks...); err != nil {
		t.Error(err)
	}
}

func second[T any](_ T, err error) error { return err }

func TestIDsUseTheWholeAlphabetEvenly(t *testing.T) {
	count := map[rune]int{}
	const n = 5000
	for range n {
		for _, r := range strings.TrimPrefix(string(NewID()), "i") {
			count[r]++
		}
	}
	want := n * idLength / len(idAlphabet)
	for _, r := range idAlphabet {
		if count[r] < want*8/10 || count[r] > want*12/10 {
			t.Errorf("%c came %d times, want about %d", r, count[r], want)
		}
	}
}

func TestIDsRefuseEverythingElse(t *testing.T) {
	good := string(NewID())
	for _, bad := range []string{
		"", "i", good[:20], good + "a", strings.ToUpper(good), "x" + good[1:], good[:20] + "/", good[:20] + "\x00",
		good[:20] + "é", "../" + good, good[:10] + ".." + good[12:], " " + good, good + "\n",
	} {
		if _, err := ParseID(bad); err == nil {
			t.Errorf("%q is accepted", bad)
		}
	}
	if _, err := ParseOperationID(good); err == nil {
		t.Error("a sandbox ID passes for an operation ID")
	}
}

func FuzzParseID(f *testing.F) {
	for _, seed := range []string{"", "i", "iabcdefghij0123456789", "iabcdefghij012345678/", "../../etc/passwd"} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, s string) {
		id, err := ParseID(s)
		if err == nil && (string(id) != s || len(s) != 21 || strings.ContainsAny(s, "/.\x00\n ")) {
			t.Errorf("%q is accepted", s)
		}
	})
}

func TestErrorsCarryCodeAndCause(t *testing.T) {
	cause := io.ErrUnexpectedEOF
	e := Errorf(CodeServiceUnavailable, "the store is %s", "down").WithCause(cause)
	wrapped := fmt.Errorf("create: %w", e)
	if CodeOf(wrapped) != CodeServiceUnavailable || !errors.Is(wrapped, cause) {
		t.Errorf("%v", wrapped)
	}
	if !e.Retryable || e.RetryAfter <= 0 {
		t.Error("a service error is not retryable")
	}
	if CodeOf(cause) != CodeInternal || CodeOf(nil) != "" {
		t.Errorf("foreign %q, nil %q", CodeOf(cause), CodeOf(nil))
	}
	if AsError(cause).Message != "internal error" {
		t.Error("a foreign cause shows in the message")
	}
	if r := e.Record().Err(); r.Code != e.Code || r.Message != e.Message || !r.Retryable || errors.Is(r, cause) {
		t.Errorf("record round trip: %+v", r)
	}
}

func TestWithLeavesTheOriginalAlone(t *testing.T) {
	e := Errorf(CodeNotFound, "no such sandbox")
	_ = e.WithRemediation("list them").WithCause(io.EOF)
	if e.Details.Remediation != "" || e.Unwrap() != nil {
		t.Errorf("changed: %+v", e)
	}
}

func TestInvalidNamesTheField(t *testing.T) {
	e := Invalid("argv[3]", "max_length", "longer than %d bytes", MaxArg)
	if e.Code != CodeInvalidRequest || e.Retryable || len(e.Details.Violations) != 1 || e.Details.Violations[0].Field != "argv[3]" {
		t.Errorf("%+v", e)
	}
	if !strings.HasPrefix(e.Message, "argv[3]: ") {
		t.Errorf("message %q", e.Message)
	}
}

func TestConflictTellsWhereFrom(t *testing.T) {
	e := ConflictState("exec in", StateCreating, StateCreating.Transitional(), StateRunning)
	raw, err := json.Marshal(e.Details)
	if err != nil {
		t.Fatal(err)
	}
	if string(raw) != `{"state":"creating","allowed_from":["running"]}` || !e.Retryable || e.RetryAfter == 0 {
		t.Errorf("%s retryable %v", raw, e.Retryable)
	}
	if e := ConflictState("exec in", StateFailed, false, StateRunning); e.Retryable || e.RetryAfter != 0 {
		t.Error("a final state is retryable")
	}
}

func TestStates(t *testing.T) {
	for s, transitional := range map[State]bool{
		StateCreating: true, StateRunning: false, StatePausing: true, StatePaused: false, StateSuspending: true,
		StateSuspended: false, StateWaking: true, StateDeleting: true, StateDeleted: false, StateFailed: false,
	} {
		if s.Transitional() != transitional || !s.Valid() {
			t.Errorf("%s: transitional %v, valid %v", s, s.Transitional(), s.Valid())
		}
	}
	if State("gone").Valid() || State("").Valid() {
		t.Error("an unknown state is valid")
	}
	for s, ended := range map[OperationState]bool{OpPending: false, OpRunning: false, OpSucceeded: true, OpFailed: true} {
		if s.Ended() != ended {
			t.Errorf("%s ended: %v", s, s.Ended())
		}
	}
}

func TestScopesAreDistinct(t *testing.T) {
	seen := map[string]bool{}
	for _, s := range AllScopes() {
		if seen[s] || !strings.Contains(s, ":") {
			t.Errorf("scope %q", s)
		}
		seen[s] = true
	}
}
