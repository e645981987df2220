package e2e

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// step is one command of a console block with the output that the page shows.
type step struct {
	command string
	want    []string
}

// consoleBlocks reads the ```console blocks of a page. Lines that begin with "$ " are commands.
func consoleBlocks(page string) [][]step {
	var blocks [][]step
	for _, block := range regexp.MustCompile("(?s)```console\n(.*?)```").FindAllStringSubmatch(page, -1) {
		var steps []step
		for line := range strings.Lines(block[1]) {
			line = strings.TrimRight(line, "\n")
			if command, ok := strings.CutPrefix(line, "$ "); ok {
				steps = append(steps, step{command: command})
			} else if n := len(steps); n > 0 {
				steps[n-1].want = append(steps[n-1].want, line)
			}
		}
		blocks = append(blocks, steps)
	}
	return blocks
}

// matches compares output with what the page shows, where … stands for anything.
func matches(got string, want []string) bool {
	pattern := regexp.QuoteMeta(strings.TrimSpace(strings.Join(want, "\n")))
	pattern = strings.ReplaceAll(pattern, "…", "(?s:.*?)")
	return regexp.MustCompile("^" + pattern + "$").MatchString(strings.TrimSpace(got))
}

// TestReadmeIsTrue runs the README's sessions as they stand there.
func TestReadmeIsTrue(t *testing.T) {
	t.Parallel()
	page, err := os.ReadFile("../../README.md")
	if err != nil {
		t.Fatal(err)
	}
	blocks := consoleBlocks(string(page))
	if len(blocks) < 2 {
		t.Fatalf("%d console blocks in the README", len(blocks))
	}
	const mark = "\x1e" // between the outputs of two commands
	for _, steps := range blocks {
		script := ""
		for _, s := range steps {
			script += s.command + "\nprintf '" + `\036` + "'\n"
		}
		cmd := exec.Command("bash", "-c", "exec 2>&1; "+script)
		cmd.Dir = t.TempDir()
		cmd.Env = shared.cliCommand().Env
		cmd.Env = append(cmd.Env, "PATH="+filepath.Dir(spaceBin())+":"+os.Getenv("PATH"))
		out, err := cmd.Output()
		if err != nil {
			t.Errorf("session: %v", err)
		}
		outputs := strings.Split(string(out), mark)
		for i, s := range steps {
			if i >= len(outputs) || !matches(outputs[i], s.want) {
				t.Errorf("$ %s\ngot  %q\nwant %q", s.command, outputs[min(i, len(outputs)-1)], strings.Join(s.want, "\n"))
			}
		}
	}
}
