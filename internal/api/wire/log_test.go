package wire

import (
	"bytes"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"
)

// A platform that is starting is asked for its readiness twice a second: the log stays quiet about that, and about that only.
func TestOnlyReadinessFailsQuietly(t *testing.T) {
	for path, loud := range map[string]bool{"/readyz": false, "/v1/sandboxes": true} {
		var out bytes.Buffer
		rec := &Recorder{ResponseWriter: httptest.NewRecorder(), Status: http.StatusServiceUnavailable}
		logRequest(slog.New(slog.NewTextHandler(&out, nil)), httptest.NewRequest(http.MethodGet, path, nil), rec, "req", time.Millisecond)
		if (out.Len() > 0) != loud {
			t.Errorf("%s: logged %q", path, out.String())
		}
	}
}
