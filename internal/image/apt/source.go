package apt

import (
	"bufio"
	"fmt"
	"regexp"
	"strings"
)

// Source is one place packages come from: the `deb` entries of apt, multiplied out to one URI and one suite each.
type Source struct {
	URI        string
	Suite      string
	Components []string
	// SignedBy is an absolute keyring path, or fingerprints, or empty for apt's trusted keys.
	SignedBy string
	// Options are the entry's other one-line options ("trusted=yes"), in the order found.
	Options []string
}

// Line is the source in the one-line format.
func (s Source) Line() string {
	options := s.Options
	if s.SignedBy != "" {
		options = append([]string{"signed-by=" + s.SignedBy}, options...)
	}
	prefix := "deb "
	if len(options) > 0 {
		prefix += "[" + strings.Join(options, " ") + "] "
	}
	return prefix + strings.Join(append([]string{s.URI, s.Suite}, s.Components...), " ")
}

// List is several sources as the text of a sources.list.
func List(sources []Source) string {
	var b strings.Builder
	for _, s := range sources {
		b.WriteString(s.Line() + "\n")
	}
	return b.String()
}

var oneLine = regexp.MustCompile(`^deb(?:\s+\[([^\]]*)\])?\s+(\S+)\s+(\S+)((?:\s+\S+)*)\s*$`)

// ParseList parses a sources.list. Entries for source packages and lines that apt would not accept are left out.
func ParseList(text string) []Source {
	var out []Source
	lines := bufio.NewScanner(strings.NewReader(text))
	for lines.Scan() {
		line, _, _ := strings.Cut(lines.Text(), "#")
		m := oneLine.FindStringSubmatch(strings.TrimSpace(line))
		if m == nil {
			continue
		}
		s := Source{URI: m[2], Suite: m[3], Components: strings.Fields(m[4])}
		for _, o := range strings.Fields(m[1]) {
			s.addOption(o)
		}
		out = append(out, s)
	}
	return out
}

// addOption takes one option over. An architecture list is dropped: what is built here has one architecture.
func (s *Source) addOption(option string) {
	key, value, ok := strings.Cut(option, "=")
	switch {
	case !ok || strings.EqualFold(key, "arch"):
	case strings.EqualFold(key, "signed-by"):
		s.SignedBy = value
	default:
		s.Options = append(s.Options, strings.ToLower(key)+"="+value)
	}
}

// ParseDeb822 parses the stanzas of a .sources file.
func ParseDeb822(text string) []Source {
	var out []Source
	for _, stanza := range splitStanzas(text) {
		fields := parseStanza(stanza)
		if strings.EqualFold(strings.TrimSpace(fields["enabled"]), "no") || !hasWord(fields["types"], "deb") {
			continue
		}
		signedBy := strings.TrimSpace(fields["signed-by"])
		if strings.Contains(signedBy, "-----BEGIN") {
			continue // an inline key has no one-line form
		}
		for _, uri := range strings.Fields(fields["uris"]) {
			for _, suite := range strings.Fields(fields["suites"]) {
				s := Source{URI: uri, Suite: suite, Components: strings.Fields(fields["components"]),
					SignedBy: strings.Join(strings.Fields(signedBy), ",")}
				for _, key := range []string{"trusted", "check-valid-until", "check-date"} {
					if v := strings.TrimSpace(fields[key]); v != "" {
						s.Options = append(s.Options, key+"="+v)
					}
				}
				out = append(out, s)
			}
		}
	}
	return out
}

func splitStanzas(text string) [][]string {
	var stanzas [][]string
	var current []string
	for _, line := range strings.Split(strings.ReplaceAll(text, "\r\n", "\n"), "\n") {
		switch {
		case strings.HasPrefix(line, "#"):
		case strings.TrimSpace(line) == "":
			if current != nil {
				stanzas = append(stanzas, current)
			}
			current = nil
		default:
			current = append(current, line)
		}
	}
	if current != nil {
		stanzas = append(stanzas, current)
	}
	return stanzas
}

// parseStanza joins continuation lines with a blank and lower-cases field names.
func parseStanza(lines []string) map[string]string {
	fields := map[string]string{}
	last := ""
	for _, line := range lines {
		if line[0] == ' ' || line[0] == '\t' {
			if last != "" {
				fields[last] += " " + strings.TrimSpace(line)
			}
			continue
		}
		key, value, ok := strings.Cut(line, ":")
		if !ok {
			last = ""
			continue
		}
		last = strings.ToLower(strings.TrimSpace(key))
		fields[last] = strings.TrimSpace(value)
	}
	return fields
}

func hasWord(list, word string) bool {
	for _, w := range strings.Fields(list) {
		if w == word {
			return true
		}
	}
	return false
}

// ForSuite keeps the sources that carry the Debian archive and moves those of the host's own release to the wanted
// one: host "trixie" and want "bookworm" turn trixie-updates into bookworm-updates. The result holds no duplicates.
func ForSuite(sources []Source, host, want string) []Source {
	var out []Source
	seen := map[string]bool{}
	for _, s := range sources {
		moved, ok := moveSuite(s.Suite, host, want)
		if !ok || !hasWord(strings.Join(s.Components, " "), "main") {
			continue
		}
		s.Suite, s.Components = moved, []string{"main"}
		if id := fmt.Sprintf("%s %s", strings.TrimRight(s.URI, "/"), s.Suite); !seen[id] {
			seen[id] = true
			out = append(out, s)
		}
	}
	return out
}

// moveSuite maps a suite of the Debian archive; others ("nodistro", "cloud-sdk-bookworm") are refused.
func moveSuite(suite, host, want string) (string, bool) {
	releases := []string{want}
	if host != "" {
		releases = append(releases, host, "stable", "oldstable")
	}
	for _, release := range releases {
		rest, ok := strings.CutPrefix(suite, release)
		if !ok {
			continue
		}
		switch rest {
		case "", "-updates", "-security":
			return want + rest, true
		}
	}
	return "", false
}
