package e2e

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"io"
	"math/rand/v2"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"
)

func sha256Hex(b []byte) string {
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:])
}

// noise writes n pseudo-random bytes to standard output and their SHA-256 to standard error.
const noise = `
import hashlib, os, random, sys
n, r, h = int(sys.argv[1]), random.Random(7), hashlib.sha256()
while n:
    b = r.randbytes(min(n, 65536)); h.update(b); n -= len(b)
    sys.stdout.buffer.write(b)
sys.stdout.flush(); print(h.hexdigest(), file=sys.stderr)
`

func TestEveryByteSurvivesDisconnects(t *testing.T) {
	t.Parallel()
	sb := shared.create(t, nil)
	const total, cuts = 64 << 20, 50
	c := shared.command(t, sb.ID, []string{"python3", "-c", noise, strconv.Itoa(total)}, nil)
	var r result
	for cut := 0; r.exit == nil; cut++ {
		if cut > cuts+3 {
			t.Fatal("the stream does not come to its end")
		}
		limit := total * (cut + 1) / (cuts + 1) // where this connection is cut
		var bad error
		err := shared.stream(c.Session, r.last, 5*time.Minute, func(e event) bool {
			bad = r.add(e)
			return bad == nil && (cut >= cuts || r.stdout.Len() < limit)
		})
		if err != nil || bad != nil {
			t.Fatalf("connection %d: %v %v", cut, err, bad)
		}
	}
	if r.code() != 0 || r.stdout.Len() != total || r.exit.StdoutBytes != total {
		t.Fatalf("code %d, %d bytes, totals %+v", r.code(), r.stdout.Len(), r.exit)
	}
	sum := sha256Hex(r.stdout.Bytes())
	if got := strings.TrimSpace(r.stderr.String()); got != sum {
		t.Errorf("guest wrote %s, we read %s", got, sum)
	}
	// The journalled output says the same, from any offset.
	const from = total - 1000
	resp, err := shared.request(context.Background(), "GET",
		"/v1/sandboxes/"+sb.ID+"/processes/"+c.Process.ID+"/output?stream=stdout&from="+strconv.Itoa(from), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	rest, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode != http.StatusOK || !bytes.Equal(rest, r.stdout.Bytes()[from:]) {
		t.Errorf("output: %s, %v, %d bytes", resp.Status, err, len(rest))
	}
}

func TestSeveralReadersSeeTheSame(t *testing.T) {
	t.Parallel()
	sb := shared.create(t, nil)
	c := shared.command(t, sb.ID, []string{"sh", "-c", "for i in $(seq 300); do echo $i; done"}, nil)
	want := ""
	for i := 1; i <= 300; i++ {
		want += strconv.Itoa(i) + "\n"
	}
	var readers sync.WaitGroup
	for range 5 {
		readers.Add(1)
		go func() {
			defer readers.Done()
			var r result
			err := shared.stream(c.Session, 0, time.Minute, func(e event) bool { return r.add(e) == nil })
			if err != nil || r.stdout.String() != want || r.code() != 0 {
				t.Errorf("reader: %v, %d bytes, code %d", err, r.stdout.Len(), r.code())
			}
		}()
	}
	readers.Wait()
	// A second session of the same process reads it all again, a reader from the middle only the rest.
	var again struct{ Session sessionJSON }
	shared.call(t, "POST", "/v1/sandboxes/"+sb.ID+"/processes/"+c.Process.ID+"/sessions", nil, &again)
	r := shared.follow(t, again.Session)
	if r.stdout.String() != want {
		t.Errorf("second session: %d bytes", r.stdout.Len())
	}
	middle := uint64(1 + rand.IntN(int(r.last)-1))
	var first uint64
	err := shared.stream(again.Session, middle, time.Minute, func(e event) bool {
		first = e.ID
		return false
	})
	if err != nil || first != middle+1 {
		t.Errorf("resumed after %d with %d: %v", middle, first, err)
	}
}

func TestOutputCapDropsWithAnEvent(t *testing.T) {
	t.Parallel()
	sb := shared.create(t, nil)
	c := shared.command(t, sb.ID, []string{"python3", "-c", noise, strconv.Itoa(8 << 20)},
		object{"output_cap_bytes": 1 << 20, "start": "now"})
	shared.await(t, sb.ID, c.Process.ID)
	var names []string
	var r exitedJSON
	kept, sawExit := 0, false
	err := shared.stream(c.Session, 0, time.Minute, func(e event) bool {
		names = append(names, e.Name)
		switch e.Name {
		case "stdout":
			var o outputJSON
			mustJSON(t, e.Data, &o)
			kept += len(o.Data)
		case "process_exited":
			mustJSON(t, e.Data, &r)
			sawExit = true
		}
		return true
	})
	if err != nil || !sawExit {
		t.Fatalf("stream: %v, exit seen: %v", err, sawExit)
	}
	if !strings.Contains(strings.Join(names[:min(3, len(names))], " "), "output_dropped") {
		t.Errorf("first events %v", names[:min(5, len(names))])
	}
	if r.StdoutBytes != 8<<20 || r.DroppedBytes+uint64(kept) < 8<<20 || kept > 2<<20 || kept == 0 {
		t.Errorf("kept %d, totals %+v", kept, r)
	}
	names = nil
	err = shared.stream(c.Session, 1, time.Minute, func(e event) bool { names = append(names, e.Name); return true })
	if err != nil || len(names) == 0 || names[0] != "resync_required" || names[len(names)-1] != "process_exited" {
		t.Errorf("resume below what is kept: %v, first %v", err, names[:min(3, len(names))])
	}
}

func TestSessionTokenIsNeeded(t *testing.T) {
	t.Parallel()
	sb := shared.create(t, nil)
	one := shared.command(t, sb.ID, []string{"true"}, nil)
	two := shared.command(t, sb.ID, []string{"true"}, nil)
	for name, s := range map[string]sessionJSON{
		"another session's token": {ID: one.Session.ID, Token: two.Session.Token},
		"no token":                {ID: one.Session.ID},
		"the API key":             {ID: one.Session.ID, Token: shared.key},
		"unknown session":         {ID: "cs00000000000000000000", Token: one.Session.Token},
	} {
		err := shared.stream(s, 0, 10*time.Second, func(event) bool { return true })
		if err == nil || !strings.Contains(err.Error(), "401") {
			t.Errorf("%s: %v", name, err)
		}
	}
}
