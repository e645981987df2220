package cli

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"text/tabwriter"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/space-sandbox/space/internal/client"
)

// escape makes text from elsewhere safe for a terminal: what does not print, changes the direction of writing or is
// not UTF-8 is shown as an escape.
func escape(s string) string {
	var b strings.Builder
	for i := 0; i < len(s); {
		r, n := utf8.DecodeRuneInString(s[i:])
		switch {
		case r == utf8.RuneError && n == 1:
			fmt.Fprintf(&b, `\x%02x`, s[i])
		case r == '\n':
			b.WriteString(`\n`)
		case r == '\t':
			b.WriteString(`\t`)
		case r < 0x80 && !unicode.IsPrint(r):
			fmt.Fprintf(&b, `\x%02x`, r)
		case !unicode.IsPrint(r):
			fmt.Fprintf(&b, `\u%04x`, r)
		default:
			b.WriteString(s[i : i+n])
		}
		i += n
	}
	return b.String()
}

// table prints rows under a head. Cells are escaped.
func table(w io.Writer, head []string, rows [][]string) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	for _, row := range append([][]string{head}, rows...) {
		cells := make([]string, len(row))
		for i, c := range row {
			cells[i] = escape(c)
		}
		if _, err := fmt.Fprintln(t, strings.TrimRight(strings.Join(cells, "\t"), "\t")); err != nil {
			return err
		}
	}
	return t.Flush()
}

// printJSON prints a value indented.
func printJSON(w io.Writer, v any) error {
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	e.SetEscapeHTML(false)
	return e.Encode(v)
}

// result prints v as JSON, or by the function that makes a table.
func (a *app) result(v any, asTable func() error) error {
	if a.output == "json" {
		return printJSON(a.out, v)
	}
	return asTable()
}

// printError says what went wrong and what to do next.
func (a *app) printError(err error) {
	_, _ = fmt.Fprintf(a.errOut, "space: %s\n", escape(err.Error()))
	if next := remedy(err); next != "" {
		_, _ = fmt.Fprintf(a.errOut, "  what to do: %s\n", escape(next))
	}
	var e *client.Error
	if !errors.As(err, &e) {
		return
	}
	for _, v := range e.Details.Violations {
		_, _ = fmt.Fprintf(a.errOut, "  %s: %s\n", escape(v.Field), escape(v.Message))
	}
	if e.Details.Cause != "" {
		_, _ = fmt.Fprintf(a.errOut, "  cause: %s\n", escape(e.Details.Cause))
	}
	if e.RequestID != "" {
		_, _ = fmt.Fprintf(a.errOut, "  request: %s\n", escape(e.RequestID))
	}
}

// remedy is the next step after an error, "" if there is none to tell.
func remedy(err error) string {
	var e *client.Error
	if errors.As(err, &e) {
		return e.Details.Remediation
	}
	var op *net.OpError
	if errors.As(err, &op) && op.Op == "dial" {
		return "start the platform with: space up; or say where it is in SPACE_API_URL and SPACE_DATA_PLANE_URL"
	}
	return ""
}

func text(s *string) string {
	if s == nil {
		return ""
	}
	return *s
}

// ago tells a time as its age.
func ago(t *time.Time) string {
	if t == nil || t.IsZero() {
		return "-"
	}
	d := time.Since(*t)
	switch {
	case d < time.Second:
		return "now"
	case d < time.Minute:
		return fmt.Sprintf("%ds ago", int(d.Seconds()))
	case d < time.Hour:
		return fmt.Sprintf("%dm ago", int(d.Minutes()))
	case d < 48*time.Hour:
		return fmt.Sprintf("%dh ago", int(d.Hours()))
	}
	return fmt.Sprintf("%dd ago", int(d.Hours()/24))
}
