// Package buildtools runs the host's own programs (apt-get, mmdebstrap, mke2fs) for builds, and makes sure that none
// outlives its caller.
//
// Each command is the leader of its own process group and, when the caller is root, of a PID and mount namespace of
// its own: killing it kills everything it started, and what it mounted goes with it. When the context ends the group
// first gets SIGTERM, so that tools remove their work, and SIGKILL a grace period later. A command also dies with the
// calling process. Standard input is empty; the environment is the caller's with the given changes and LC_ALL=C.UTF-8.
//
// Concurrency: Run blocks until the command and the copying of its output have ended; calls are independent.
//
// Failures: ErrMissing when the program is not installed; otherwise the error holds the end of what it wrote to
// standard error.
package buildtools
