package api

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/space-sandbox/space/internal/api/apitest"
	"github.com/space-sandbox/space/internal/sandbox"
)

func TestCreateTakesDefaultsAndEverything(t *testing.T) {
	b := newBench(t)
	got := b.do(t, "POST", "/v1/sandboxes", object{"template": "base"})
	got.into(t, 202, nil)
	if !strings.HasPrefix(got.header.Get("Location"), "/v1/sandboxes/i") {
		t.Errorf("Location %q", got.header.Get("Location"))
	}
	b.do(t, "POST", "/api/v1/sandboxes", object{
		"template": "base:1", "environment": "E1", "metadata": object{"a": "b"}, "env": object{"A": "B"}, "resources": object{"vcpu": 2},
		"lifecycle": object{"idle_suspend_after_s": nil, "max_lifetime_s": 60, "on_max_lifetime": "suspend", "auto_wake": false},
	}).into(t, 202, nil)
	first, second := b.Created[0], b.Created[1]
	if l := first.Lifecycle; first.Environment != "auto" || *l.IdleSuspendAfterS != 21600 || l.MaxLifetimeS != nil || l.OnMaxLifetime != "delete" || !l.AutoWake {
		t.Errorf("defaults %+v", first)
	}
	if l := second.Lifecycle; second.Environment != "E1" || l.IdleSuspendAfterS != nil || *l.MaxLifetimeS != 60 || l.OnMaxLifetime != "suspend" || l.AutoWake ||
		second.Resources.VCPU != 2 || second.Metadata["a"] != "b" || second.Env["A"] != "B" {
		t.Errorf("given %+v", second)
	}
}

func TestLimitsOfMetadataAndEnv(t *testing.T) {
	entries := func(n int) object {
		m := object{}
		for i := range n {
			m[fmt.Sprintf("K%d", i)] = "v"
		}
		return m
	}
	b := newBench(t)
	for name, c := range map[string]struct {
		good, bad object
		field     string
	}{
		"entries":   {object{"metadata": entries(64)}, object{"metadata": entries(65)}, "metadata"},
		"key":       {object{"metadata": object{strings.Repeat("k", 128): ""}}, object{"metadata": object{strings.Repeat("k", 129): ""}}, "metadata"},
		"value":     {object{"metadata": object{"k": strings.Repeat("v", 1024)}}, object{"metadata": object{"k": strings.Repeat("v", 1025)}}, "metadata.k"},
		"env":       {object{"env": entries(256)}, object{"env": entries(257)}, "env"},
		"env name":  {object{"env": object{"A b": "="}}, object{"env": object{"A=B": ""}}, "env"},
		"env empty": {object{"env": object{"A": ""}}, object{"env": object{"": "x"}}, "env"},
		"env NUL":   {object{"env": object{"A": "\x01"}}, object{"env": object{"A": "\x00"}}, "env.A"},
		"env size":  {object{"env": object{"A": strings.Repeat("v", 131069)}}, object{"env": object{"A": strings.Repeat("v", 131070)}}, "env.A"},
	} {
		t.Run(name, func(t *testing.T) {
			c.good["template"], c.bad["template"] = "base", "base"
			b.do(t, "POST", "/v1/sandboxes", c.good).into(t, 202, nil)
			e := b.do(t, "POST", "/v1/sandboxes", c.bad).refused(t, 400, "invalid_request")
			if e.Details.Violations[0].Field != c.field {
				t.Errorf("violations %+v, want field %s", e.Details.Violations, c.field)
			}
		})
	}
}

func TestPreferWait(t *testing.T) {
	b := newBench(t)
	post := func(prefer string) result {
		return b.do(t, "POST", "/v1/sandboxes", object{"template": "base"}, "Prefer", prefer)
	}
	var a struct{ Operation struct{ ID string } }
	got := post("wait=0")
	got.into(t, 202, &a)
	if got.header.Get("Preference-Applied") != "wait=0" {
		t.Errorf("applied %q", got.header.Get("Preference-Applied"))
	}
	for _, ignored := range []string{"wait", "wait=x", "wait=-1", "respond-async"} {
		if got := post(ignored); got.status != 202 || got.header.Get("Preference-Applied") != "" {
			t.Errorf("%q: %d, applied %q", ignored, got.status, got.header.Get("Preference-Applied"))
		}
	}
	// The operation ends while the call waits. The operation in question is whichever is new.
	for _, c := range []struct {
		prefer  string
		err     *sandbox.Error
		status  int
		applied string
	}{
		{"respond-async, wait=20", nil, 201, "wait=20"},
		{"wait=999", nil, 201, "wait=60"},
		{"WAIT=20", sandbox.Errorf(sandbox.CodeCapacityUnavailable, "no node has room"), 503, "wait=20"},
	} {
		done := b.endNewOperations(c.err)
		got := post(c.prefer)
		done()
		if got.status != c.status || got.header.Get("Preference-Applied") != c.applied {
			t.Errorf("%q: %d %s, applied %q", c.prefer, got.status, got.body, got.header.Get("Preference-Applied"))
		}
		if c.err != nil {
			got.refused(t, 503, "capacity_unavailable")
		}
	}
	done := b.endNewOperations(nil)
	defer done()
	b.do(t, "DELETE", b.fill("/sandboxes/{id}"), nil, "Prefer", "wait=20").into(t, 200, nil)
}

// endNewOperations ends operations as they appear, until the function it returns is called.
func (b *bench) endNewOperations(err *sandbox.Error) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		for ctx.Err() == nil {
			for _, id := range b.OpenOperations() {
				b.EndOperation(id, err)
			}
			time.Sleep(time.Millisecond)
		}
	}()
	return func() { cancel(); <-done }
}

func TestDrainEndsLongWaits(t *testing.T) {
	b := newBench(t)
	var a struct{ Operation struct{ ID string } }
	b.do(t, "POST", "/v1/sandboxes", object{"template": "base"}).into(t, 202, &a)
	answered := make(chan result, 1)
	go func() { answered <- b.do(t, "GET", "/v1/operations/"+a.Operation.ID+"?wait=60", nil) }()
	for b.Waiting() == 0 {
		time.Sleep(time.Millisecond)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	if err := b.server.Drain(ctx); err != nil {
		t.Fatal(err)
	}
	(<-answered).into(t, 200, nil)
	b.do(t, "GET", "/v1/sandboxes", nil).refused(t, 503, "service_unavailable")
	b.do(t, "GET", "/healthz", nil).into(t, 200, nil)
}

func TestIdempotencyKeys(t *testing.T) {
	b := newBench(t)
	post := func(key, template string) result {
		return b.do(t, "POST", "/v1/sandboxes", object{"template": template}, "Idempotency-Key", key)
	}
	if got := post("one", "base"); got.status != 202 || got.header.Get("Idempotent-Replayed") != "" {
		t.Errorf("first: %d", got.status)
	}
	if got := post("one", "base"); got.status != 202 || got.header.Get("Idempotent-Replayed") != "true" {
		t.Errorf("repeat: %d, replayed %q", got.status, got.header.Get("Idempotent-Replayed"))
	}
	if got := b.do(t, "POST", "/api/v1/sandboxes", object{"template": "base"}, "Idempotency-Key", "one"); got.header.Get("Idempotent-Replayed") != "true" {
		t.Error("the alias is another request")
	}
	post("one", "other").refused(t, 409, "idempotency_conflict")
	post(strings.Repeat("k", 255), "base").into(t, 202, nil)
	for _, bad := range []string{strings.Repeat("k", 256), "a\tb", "é"} {
		post(bad, "base").refused(t, 400, "invalid_request")
	}
	// Calls without a record of their own go through Once.
	for range 2 {
		b.do(t, "POST", b.fill(processPath+"/signal"), object{"signal": "SIGUSR1"}, "Idempotency-Key", "s").into(t, 200, nil)
		b.do(t, "POST", b.fill(processPath+"/kill"), nil, "Idempotency-Key", "k").into(t, 200, nil)
		b.do(t, "POST", b.fill("/sandboxes/{id}/files/mkdir"), object{"path": "/d"}, "Idempotency-Key", "m").into(t, 200, nil)
		b.do(t, "POST", b.fill(processPath+"/stdin"), strings.NewReader("x"), "Idempotency-Key", "i").into(t, 204, nil)
	}
	if in, _ := b.Guests.Stdin(); len(b.Guests.Signals) != 2 || string(in) != "x" {
		t.Errorf("%d signals, input %q", len(b.Guests.Signals), in)
	}
	put := func(body string) result {
		return b.do(t, "PUT", b.fill(contentPath)+"?path=/f", strings.NewReader(body), "Idempotency-Key", "p")
	}
	put("one").into(t, 200, nil)
	put("two").into(t, 200, nil) // the same length: written again
	if got, _, _ := b.Guests.File("/f"); string(got) != "two" {
		t.Errorf("file %q", got)
	}
	put("longer").refused(t, 409, "idempotency_conflict")
}

func TestListTakesItsFilters(t *testing.T) {
	b := newBench(t)
	var page struct {
		Items      []json.RawMessage
		NextCursor string `json:"next_cursor"`
	}
	b.do(t, "GET", "/v1/sandboxes?limit=7&cursor=c&state=running&state=failed&template=base&order=desc&metadata[team]=a&metadata%5Bx%5D=b", nil).into(t, 200, &page)
	q := b.Lists[0]
	if q.Limit != 7 || q.Cursor != "c" || len(q.States) != 2 || q.Template != "base" || !q.Descending || q.Metadata["team"] != "a" || q.Metadata["x"] != "b" {
		t.Errorf("query %+v", q)
	}
	if len(page.Items) != 1 || page.NextCursor != "more" {
		t.Errorf("page %+v", page)
	}
	for _, bad := range []string{"limit=0", "limit=1001", "limit=x", "limit=1&limit=2", "state=nope", "order=up", "metadata=x", "metadata[a", "limit=", "template="} {
		b.do(t, "GET", "/v1/sandboxes?"+bad, nil).refused(t, 400, "invalid_request")
	}
	b.do(t, "GET", "/v1/sandboxes?limit=1000", nil).into(t, 200, nil)
}

func TestRecordHasItsShape(t *testing.T) {
	b := newBench(t)
	var sb map[string]any
	got := b.do(t, "GET", b.fill("/sandboxes/{id}"), nil)
	got.into(t, 200, &sb)
	if sb["created_at"] != "2026-01-31T12:00:00.123Z" || sb["etag"] != `"3"` || got.header.Get("Etag") != `"3"` || sb["suspended_at"] != nil {
		t.Errorf("%s", got.body)
	}
	for _, field := range []string{"id", "template", "environment", "state", "state_reason", "generation", "etag", "resources", "lifecycle", "metadata",
		"network", "node", "created_at", "updated_at", "last_active_at", "suspended_at", "suspend_due_at", "project_id", "operation_id"} {
		if _, ok := sb[field]; !ok {
			t.Errorf("no field %s", field)
		}
	}
}

func TestUpdate(t *testing.T) {
	b := newBench(t)
	path := b.fill("/sandboxes/{id}")
	b.do(t, "PATCH", path, object{"metadata": object{"a": "b"}}, "If-Match", `"3"`).into(t, 200, nil)
	b.do(t, "PATCH", path, object{"lifecycle": object{"max_lifetime_s": 9}}, "If-Match", "3").into(t, 200, nil)
	b.do(t, "PATCH", path, object{}, "If-Match", "*").into(t, 200, nil)
	if u := b.Updates; u[0].Lifecycle != nil || u[0].Metadata["a"] != "b" || u[1].Metadata != nil || *u[1].Lifecycle.MaxLifetimeS != 9 || !u[1].Lifecycle.AutoWake || u[2].IfMatch != nil {
		t.Errorf("updates %+v", u)
	}
	b.do(t, "PATCH", path, object{}, "If-Match", `"2"`).refused(t, 412, "failed_precondition")
	b.do(t, "PATCH", path, object{}, "If-Match", "x").refused(t, 400, "invalid_request")
	b.do(t, "PATCH", path, object{"state": "running"}).refused(t, 400, "invalid_request")
}

func TestConcurrencyLimit(t *testing.T) {
	for _, mode := range []string{ConcurrencyEnforce, ConcurrencyObserve} {
		b := newBench(t, func(c *Config) { c.Concurrency, c.ConcurrencyMode = 1, mode })
		release, _, ok := b.server.limit.enter(string(b.Principal(apitest.AdminKey).KeyID))
		if !ok {
			t.Fatal("the first one is refused")
		}
		got := b.do(t, "GET", "/v1/sandboxes", nil)
		if mode == ConcurrencyEnforce {
			got.refused(t, 429, "rate_limited")
		} else if got.status != 200 {
			t.Errorf("observed: %d", got.status)
		}
		b.do(t, "GET", "/v1/sandboxes", nil, "Authorization", "", "X-API-Key", apitest.ReaderKey).into(t, 200, nil)
		b.do(t, "GET", b.fill(processPath)+"?wait=1", nil).into(t, 200, nil)
		release()
		b.do(t, "GET", "/v1/sandboxes", nil).into(t, 200, nil)
		if len(b.server.limit.running) != 0 {
			t.Errorf("counters are left: %v", b.server.limit.running)
		}
	}
}

func TestKeysAndTemplates(t *testing.T) {
	b := newBench(t)
	var k struct {
		Key    *string
		ID     string
		Scopes []string
	}
	body := object{"name": "ci", "scopes": []string{"files:read"}, "expires_at": "2099-01-01T00:00:00Z", "sandbox_ids": []string{string(b.Sandbox.ID)}}
	b.do(t, "POST", "/v1/api-keys", body, "Idempotency-Key", "k").into(t, 201, &k)
	if k.Key == nil || *k.Key != apitest.AdminKey || k.Scopes[0] != "files:read" {
		t.Errorf("%+v", k)
	}
	if b.do(t, "POST", "/v1/api-keys", body, "Idempotency-Key", "k").into(t, 201, &k); k.Key != nil {
		t.Error("a replay shows the key")
	}
	for field, bad := range map[string]object{
		"scopes[0]": {"scopes": []string{"all"}}, "scopes": {"scopes": []string{}}, "expires_at": {"expires_at": "2001-01-01T00:00:00Z"},
		"sandbox_ids[0]": {"sandbox_ids": []string{"x"}}, "name": {"name": ""},
	} {
		full := object{"name": "ci", "scopes": []string{"files:read"}}
		for k, v := range bad {
			full[k] = v
		}
		if e := b.do(t, "POST", "/v1/api-keys", full).refused(t, 400, "invalid_request"); e.Details.Violations[0].Field != field {
			t.Errorf("%s: %+v", field, e.Details.Violations)
		}
	}
	b.do(t, "POST", "/v1/api-keys", object{"name": "n", "scopes": []string{"files:read"}, "expires_at": "soon"}).refused(t, 400, "invalid_request")
	b.do(t, "GET", "/v1/api-keys", nil).into(t, 200, nil)
	b.do(t, "GET", "/v1/api-keys?cursor=x", nil).refused(t, 400, "invalid_request")
	b.do(t, "DELETE", "/v1/api-keys/"+k.ID, nil).into(t, 200, nil)
	b.do(t, "DELETE", "/v1/api-keys/x", nil).refused(t, 404, "not_found")
	b.do(t, "GET", "/v1/templates", nil).into(t, 200, nil)
	b.do(t, "GET", "/v1/templates/base", nil).into(t, 200, nil)
	b.do(t, "GET", "/v1/templates/none", nil).refused(t, 404, "not_found")
}
