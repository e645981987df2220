// Package proc is the guest's process table: it starts processes as users inside cgroups of their own, numbers and
// keeps their output until it is acknowledged, delivers input and signals, and reaps.
//
// Concurrency: everything may be called from any number of goroutines. One reaper collects exit statuses; starting a
// process and collecting are mutually exclusive, so a status never arrives before its process is known and a pid is
// never signalled after it was collected. A gate keeps processes from starting while the table is frozen. Each
// process has one goroutine per output pipe, which ends at the end of the pipe, and one that waits for the exit.
//
// Failures: errors are Connect errors ready for the wire. A program that cannot be executed is not an error but a
// process that exits with 126 or 127. Output is never dropped before the main process has exited; what background
// children write after that is read and thrown away, so that they do not die of a broken pipe.
package proc
