package qmp

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

const hello = `{"QMP": {"version": {"qemu": {"micro": 2, "minor": 1, "major": 9}, "package": "Test"}, "capabilities": []}}` + "\n"

// pair returns a client and the connection of a fake QEMU.
func pair(t *testing.T, onEvent func(Event)) (*Client, *net.UnixConn) {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	var conns [2]*net.UnixConn
	for i, fd := range fds {
		f := os.NewFile(uintptr(fd), "pair")
		conn, err := net.FileConn(f)
		f.Close()
		if err != nil {
			t.Fatal(err)
		}
		conns[i] = conn.(*net.UnixConn)
		t.Cleanup(func() { conn.Close() })
	}
	c := New(conns[0], onEvent)
	t.Cleanup(func() { _ = c.Close() })
	return c, conns[1]
}

// serve answers every command with what respond says, in which %d is the command's number.
func serve(t *testing.T, conn net.Conn, respond func(command string) string) {
	t.Helper()
	go func() {
		lines := bufio.NewScanner(conn)
		for lines.Scan() {
			var r struct {
				Execute string `json:"execute"`
				ID      uint64 `json:"id"`
			}
			if json.Unmarshal(lines.Bytes(), &r) != nil {
				return
			}
			text := respond(r.Execute)
			if strings.Contains(text, "%d") {
				text = fmt.Sprintf(text, r.ID)
			}
			if _, err := io.WriteString(conn, text); err != nil {
				return
			}
		}
	}()
}

func TestHandshakeAndCommands(t *testing.T) {
	events := make(chan Event, 4)
	c, peer := pair(t, func(e Event) { events <- e })
	serve(t, peer, func(command string) string {
		switch command {
		case "query-status":
			return `{"event": "STOP", "data": {"a": 1}}` + "\n" + `{"return": {"status": "paused"}, "id": 99999}` + "\n" +
				`{"return": {"status": "running"}, "id": %d}` + "\n"
		case "cont":
			return `{"error": {"class": "GenericError", "desc": "no way"}, "id": %d}` + "\n"
		case "qom-list-properties":
			return `{"return": [{"name": "size"}, {"name": "rom"}], "id": %d}` + "\n"
		case "query-machines":
			return `{"return": [{"name": "microvm"}], "id": %d}` + "\n"
		}
		return `{"return": {}, "id": %d}` + "\n"
	})
	if _, err := io.WriteString(peer, hello); err != nil {
		t.Fatal(err)
	}
	g, err := c.Handshake(t.Context())
	if err != nil || g != (Greeting{9, 1, 2, "Test"}) {
		t.Fatalf("%+v, %v", g, err)
	}
	if s, err := c.Status(t.Context()); err != nil || s != Running {
		t.Errorf("status %q, %v", s, err)
	}
	if e := <-events; e.Name != "STOP" || string(e.Data) != `{"a": 1}` {
		t.Errorf("event %+v", e)
	}
	var answer *Error
	if err := c.Cont(t.Context()); !errors.As(err, &answer) || answer.Desc != "no way" || answer.Class != "GenericError" || answer.Command != "cont" {
		t.Errorf("cont: %v", err)
	}
	if err := c.Stop(t.Context()); err != nil {
		t.Error(err)
	}
	for property, want := range map[string]bool{"rom": true, "other": false} {
		if has, err := c.HasProperty(t.Context(), "memory-backend-file", property); err != nil || has != want {
			t.Errorf("%s: %v, %v", property, has, err)
		}
	}
	for machine, want := range map[string]bool{"microvm": true, "pc": false} {
		if has, err := c.HasMachine(t.Context(), machine); err != nil || has != want {
			t.Errorf("%s: %v, %v", machine, has, err)
		}
	}
}

// Answers may come in any order, and late ones are for nobody.
func TestConcurrentCallsGetTheirOwnAnswers(t *testing.T) {
	c, peer := pair(t, nil)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if err := c.Stop(ctx); !errors.Is(err, context.DeadlineExceeded) { // number 1 gives up
		t.Fatalf("call without an answer: %v", err)
	}
	var calls sync.WaitGroup
	for range 2 { // numbers 2 and 3
		calls.Go(func() {
			var id uint64
			err := c.Do(t.Context(), "x", nil, &id)
			if err != nil || id < 2 {
				t.Errorf("got the answer of %d, %v", id, err)
			}
		})
	}
	lines := bufio.NewScanner(peer)
	for range 3 {
		lines.Scan()
	}
	for id := 3; id >= 1; id-- {
		if _, err := fmt.Fprintf(peer, "{\"return\": %d, \"id\": %d}\n", id, id); err != nil {
			t.Fatal(err)
		}
	}
	calls.Wait()
}

func TestDescriptorsAreSentAlong(t *testing.T) {
	c, peer := pair(t, nil)
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	defer w.Close()
	result := make(chan error, 1)
	go func() { result <- c.Do(t.Context(), "getfd", map[string]any{"fdname": "x"}, nil, w) }()
	buf, oob := make([]byte, 1024), make([]byte, 128)
	n, oobn, _, _, err := peer.ReadMsgUnix(buf, oob)
	if err != nil {
		t.Fatal(err)
	}
	if want := `{"execute":"getfd","arguments":{"fdname":"x"},"id":1}` + "\n"; string(buf[:n]) != want {
		t.Errorf("request %q", buf[:n])
	}
	messages, err := unix.ParseSocketControlMessage(oob[:oobn])
	if err != nil || len(messages) != 1 {
		t.Fatal(messages, err)
	}
	fds, err := unix.ParseUnixRights(&messages[0])
	if err != nil || len(fds) != 1 {
		t.Fatal(fds, err)
	}
	got := os.NewFile(uintptr(fds[0]), "received")
	defer got.Close()
	if _, err := got.WriteString("hi"); err != nil {
		t.Fatal(err)
	}
	text := make([]byte, 2)
	if _, err := io.ReadFull(r, text); err != nil || string(text) != "hi" {
		t.Errorf("%q, %v", text, err)
	}
	if _, err := io.WriteString(peer, `{"return": {}, "id": 1}`+"\n"); err != nil {
		t.Fatal(err)
	}
	if err := <-result; err != nil {
		t.Error(err)
	}
}

// Whatever ends the connection, calls under way and later ones fail with ErrClosed.
func TestEndOfConnection(t *testing.T) {
	for name, end := range map[string]func(c *Client, peer *net.UnixConn) error{
		"peer closes":   func(_ *Client, peer *net.UnixConn) error { return peer.Close() },
		"client closes": func(c *Client, _ *net.UnixConn) error { return c.Close() },
		"no JSON":       func(_ *Client, peer *net.UnixConn) error { _, err := io.WriteString(peer, "what\n"); return err },
		"line without end": func(_ *Client, peer *net.UnixConn) error {
			_, _ = io.WriteString(peer, strings.Repeat("x", maxLine+1)) // fails when the client hangs up
			return nil
		},
	} {
		t.Run(name, func(t *testing.T) {
			c, peer := pair(t, nil)
			result := make(chan error, 1)
			go func() { result <- c.Stop(t.Context()) }()
			if _, err := peer.Read(make([]byte, 1024)); err != nil {
				t.Fatal(err)
			}
			if err := end(c, peer); err != nil {
				t.Fatal(err)
			}
			if err := <-result; !errors.Is(err, ErrClosed) {
				t.Errorf("call under way: %v", err)
			}
			<-c.Done()
			if err := c.Stop(t.Context()); !errors.Is(err, ErrClosed) {
				t.Errorf("later call: %v", err)
			}
			if _, err := c.Handshake(t.Context()); !errors.Is(err, ErrClosed) {
				t.Errorf("handshake: %v", err)
			}
			if err := c.Close(); err != nil {
				t.Errorf("close: %v", err)
			}
		})
	}
}

// A peer that does not read must not hold a call beyond its deadline.
func TestPeerThatDoesNotRead(t *testing.T) {
	c, _ := pair(t, nil)
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	big := strings.Repeat("x", 8<<20)
	done := make(chan error, 1)
	go func() { done <- c.Do(ctx, "cmd", big, nil) }()
	select {
	case err := <-done:
		if err == nil {
			t.Error("no error")
		}
	case <-time.After(10 * time.Second):
		t.Fatal("the call ignores its deadline")
	}
}

func TestHandshakeDeadline(t *testing.T) {
	c, _ := pair(t, nil)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if _, err := c.Handshake(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("%v", err)
	}
}

func FuzzParse(f *testing.F) {
	for _, seed := range []string{
		strings.TrimSpace(hello), `{"return": {}, "id": 1}`, `{"error": {"class": "C", "desc": "d"}, "id": 2}`,
		`{"event": "STOP", "data": {}, "timestamp": {"seconds": 1}}`, `{"id": -1}`, `{"id": "x"}`, `[]`, `null`, `{"return": null, "id": 1}`,
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, line []byte) {
		m, err := parse(line)
		if err != nil {
			return
		}
		c := &Client{greeted: make(chan struct{}), pending: map[uint64]chan message{1: make(chan message, 1)}}
		c.handle(m)
		c.handle(m) // an answer that comes twice must not block the reader
		var result struct{ Status string }
		if err := m.decode("command", &result); m.Error != nil && err == nil {
			t.Error("an error was taken for an answer")
		}
	})
}
