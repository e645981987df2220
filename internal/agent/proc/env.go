package proc

import (
	"errors"
	"strings"

	"github.com/space-sandbox/space/internal/agent/users"
)

const defaultPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// CheckEnv reports whether every variable can be given to a process.
func CheckEnv(env map[string]string) error {
	for k, v := range env {
		if k == "" || strings.ContainsAny(k, "=\x00") || strings.IndexByte(v, 0) >= 0 {
			return errors.New("env: a name is empty or holds '=', or something holds NUL")
		}
	}
	return nil
}

// environ joins the base of a user with the guest's and the process's variables, later ones first.
func environ(u users.User, pty bool, guest, own map[string]string) map[string]string {
	env := map[string]string{"PATH": defaultPath, "HOME": u.Home, "USER": u.Name, "LOGNAME": u.Name,
		"SHELL": u.Shell, "LANG": "C.UTF-8"}
	if pty {
		env["TERM"] = "xterm-256color"
	}
	for _, more := range []map[string]string{guest, own} {
		for k, v := range more {
			env[k] = v
		}
	}
	return env
}

func envList(env map[string]string) []string {
	list := make([]string, 0, len(env))
	for k, v := range env {
		list = append(list, k+"="+v)
	}
	return list
}
