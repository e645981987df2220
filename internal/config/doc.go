// Package config owns the settings of `space up`: one struct whose tags are the single source of the flags, their
// SPACE_* environment twins, the keys of the configuration file and docs/configuration.md.
//
// Precedence is flag, then environment, then file, then default. A value that does not parse and an unknown key of the
// file are errors that name where they stand; nothing is ignored. The package has no state and starts nothing.
package config
