package proc

import (
	"net/http"
	"net/http/httptest"
	"testing"
)

// counter counts what reaches the connection.
type counter struct {
	*httptest.ResponseRecorder
	writes, flushes int
}

func (c *counter) Write(p []byte) (int, error) {
	c.writes++
	return c.ResponseRecorder.Write(p)
}

func (c *counter) Flush() { c.flushes++ }

func serve(t *testing.T, f func(w http.ResponseWriter, hold func(bool))) *counter {
	t.Helper()
	c := &counter{ResponseRecorder: httptest.NewRecorder()}
	Coalesce(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		f(w, holder(r.Context()))
	})).ServeHTTP(c, httptest.NewRequest(http.MethodPost, "/", nil))
	return c
}

func TestCoalesce(t *testing.T) {
	say := func(t *testing.T, w http.ResponseWriter, text string) {
		t.Helper()
		if _, err := w.Write([]byte(text)); err != nil {
			t.Fatal(err)
		}
		if err := http.NewResponseController(w).Flush(); err != nil {
			t.Fatal(err)
		}
	}
	c := serve(t, func(w http.ResponseWriter, hold func(bool)) {
		say(t, w, "a")
		hold(true)
		say(t, w, "b")
		say(t, w, "c")
		hold(false)
		say(t, w, "d")
	})
	if got := c.Body.String(); got != "abcd" || c.writes != 2 || c.flushes != 2 {
		t.Errorf("%q in %d writes and %d flushes", got, c.writes, c.flushes)
	}
	c = serve(t, func(w http.ResponseWriter, hold func(bool)) {
		hold(true)
		say(t, w, "held to the end")
	})
	if got := c.Body.String(); got != "held to the end" || c.flushes != 0 {
		t.Errorf("%q, %d flushes", got, c.flushes)
	}
	c = serve(t, func(w http.ResponseWriter, hold func(bool)) {
		hold(true)
		for range 3 {
			say(t, w, string(make([]byte, spillBytes/2+1)))
		}
	})
	if c.Body.Len() != 3*(spillBytes/2+1) || c.writes != 3 {
		t.Errorf("%d bytes in %d writes", c.Body.Len(), c.writes)
	}
	holder(t.Context())(true) // without a coalescer it is nothing
}
