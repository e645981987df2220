// Package arch tests the shape of the code: which package may import which, and what must stay out of the small
// binaries that run once per sandbox. It reads the module's import graph with the go command and changes nothing.
package arch
