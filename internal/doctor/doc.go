// Package doctor finds out what of the platform works on this machine and says what to do about the rest. It needs no
// running server and no root, changes nothing and leaves nothing behind.
//
// Each check is a small function of Facts, which are asked of the machine once per question; tests give their own. A
// check that itself takes long has a deadline. Checks run one after the other, since several start programs.
package doctor
