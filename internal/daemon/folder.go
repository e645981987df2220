package daemon

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// privateFolder makes a folder that only this user can enter, or makes sure that an existing one is such: in a place
// like /tmp it may be anyone's.
func privateFolder(path string) error {
	if err := os.MkdirAll(path, 0o700); err != nil {
		return err
	}
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return err
	}
	if int(st.Uid) != os.Geteuid() {
		return fmt.Errorf("%s belongs to user %d", path, st.Uid)
	}
	return f.Chmod(0o700)
}
