package client

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"time"

	"github.com/space-sandbox/space/internal/sandbox"
)

// Config says where the server is. Zero durations take their defaults.
type Config struct {
	APIURL  string // http://host:port
	DataURL string // of the data plane; "": what sessions name
	Token   string
	HTTP    *http.Client // nil: a client of its own

	RetryMin time.Duration // first pause before a stream is resumed; 50 ms
	RetryMax time.Duration // longest such pause; 2 s
	GiveUp   time.Duration // how long a stream may stay broken; 2 min
}

// Client calls the native API.
type Client struct {
	cfg Config
}

// maxAnswer bounds a JSON answer that is read.
const maxAnswer = 64 << 20

// New returns a client.
func New(cfg Config) *Client {
	cfg.APIURL, cfg.DataURL = strings.TrimSuffix(cfg.APIURL, "/"), strings.TrimSuffix(cfg.DataURL, "/")
	if cfg.HTTP == nil {
		t := &http.Transport{Proxy: http.ProxyFromEnvironment, MaxIdleConnsPerHost: 64, IdleConnTimeout: time.Minute, DisableCompression: true}
		cfg.HTTP = &http.Client{Transport: t, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
	}
	for _, d := range []struct {
		v   *time.Duration
		def time.Duration
	}{{&cfg.RetryMin, 50 * time.Millisecond}, {&cfg.RetryMax, 2 * time.Second}, {&cfg.GiveUp, 2 * time.Minute}} {
		if *d.v == 0 {
			*d.v = d.def
		}
	}
	return &Client{cfg: cfg}
}

// Error is an answer of the API that is not a success.
type Error struct {
	Status     int             `json:"-"`
	Code       sandbox.Code    `json:"code"`
	Message    string          `json:"message"`
	RequestID  string          `json:"request_id"`
	Details    sandbox.Details `json:"details"`
	Retryable  bool            `json:"retryable"`
	RetryAfter time.Duration   `json:"-"`
}

// Error implements error.
func (e *Error) Error() string { return string(e.Code) + ": " + e.Message }

// CodeOf returns the code of an *Error in err's chain, or "".
func CodeOf(err error) sandbox.Code {
	var e *Error
	if errors.As(err, &e) {
		return e.Code
	}
	return ""
}

// request is one call.
type request struct {
	method, url string
	token       string
	body        io.Reader
	size        int64 // of body, if that is more than 0 and body does not tell itself
	header      http.Header
}

func (c *Client) api(method, path string, query url.Values) request {
	u := c.cfg.APIURL + "/v1" + path
	if len(query) > 0 {
		u += "?" + query.Encode()
	}
	return request{method: method, url: u, token: c.cfg.Token, header: http.Header{}}
}

// send makes the call; an answer that is not a success becomes an *Error. The caller closes the body.
func (c *Client) send(ctx context.Context, r request) (*http.Response, error) {
	req, err := http.NewRequestWithContext(ctx, r.method, r.url, r.body)
	if err != nil {
		return nil, err
	}
	if r.size > 0 {
		req.ContentLength = r.size
	}
	for k, v := range r.header {
		req.Header[k] = v
	}
	if r.token != "" {
		req.Header.Set("Authorization", "Bearer "+r.token)
	}
	resp, err := c.cfg.HTTP.Do(req)
	if err != nil {
		return nil, err
	}
	if resp.StatusCode/100 == 2 {
		return resp, nil
	}
	defer resp.Body.Close()
	return nil, errorOf(resp)
}

func errorOf(resp *http.Response) error {
	data, err := io.ReadAll(io.LimitReader(resp.Body, 1<<20))
	e := &Error{Status: resp.StatusCode}
	if err != nil || json.Unmarshal(data, e) != nil || e.Code == "" {
		return &Error{Status: resp.StatusCode, Code: sandbox.CodeInternal, RequestID: resp.Header.Get("X-Request-Id"),
			Message: fmt.Sprintf("the server answered %s without an error envelope: is this a SPACE API?", resp.Status)}
	}
	if d, err := time.ParseDuration(resp.Header.Get("Retry-After") + "s"); err == nil && d > 0 {
		e.RetryAfter = min(d, time.Minute)
	}
	return e
}

// call sends in as JSON, if it is not nil, and decodes the answer into out, if that is not nil.
func (c *Client) call(ctx context.Context, r request, in, out any) error {
	if in != nil {
		data, err := json.Marshal(in)
		if err != nil {
			return err
		}
		r.body = bytes.NewReader(data)
		r.header.Set("Content-Type", "application/json")
	}
	resp, err := c.send(ctx, r)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if out == nil {
		_, err := io.Copy(io.Discard, io.LimitReader(resp.Body, maxAnswer))
		return err
	}
	if err := json.NewDecoder(io.LimitReader(resp.Body, maxAnswer)).Decode(out); err != nil {
		return fmt.Errorf("answer to %s %s: %w", r.method, r.url, err)
	}
	_, _ = io.Copy(io.Discard, resp.Body) // so that the connection can be used again
	return nil
}

// page is one page of a list.
type page[T any] struct {
	Items      []T     `json:"items"`
	NextCursor *string `json:"next_cursor"`
}

// all reads every page of a list.
func all[T any](ctx context.Context, c *Client, path string, query url.Values) ([]T, error) {
	out := []T{}
	for {
		var p page[T]
		if err := c.call(ctx, c.api(http.MethodGet, path, query), nil, &p); err != nil {
			return nil, err
		}
		out = append(out, p.Items...)
		if p.NextCursor == nil || *p.NextCursor == "" {
			return out, nil
		}
		if query == nil {
			query = url.Values{}
		}
		query.Set("cursor", *p.NextCursor)
	}
}

// Ready reports whether the server can create sandboxes; the *Error says why not.
func (c *Client) Ready(ctx context.Context) error {
	return c.call(ctx, request{method: http.MethodGet, url: c.cfg.APIURL + "/readyz", header: http.Header{}}, nil, nil)
}
