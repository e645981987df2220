// Package cli is the command line: it parses, calls internal/client or internal/daemon, and prints. Names of commands
// and flags are a contract with scripts, as are exit codes: the process's own for run and exec, 128+n for signal n,
// 125 for run and exec when we fail, 1 for other commands.
//
// Results go to standard output, everything else to standard error. What comes from a server or a guest is escaped
// before it reaches a table; a command's own output is passed on byte by byte. The package holds no state: an app
// carries the streams and the environment, so that tests can give their own.
package cli
