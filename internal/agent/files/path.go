package files

import (
	"strings"

	"golang.org/x/sys/unix"
)

// resolve makes a path absolute. Empty and "." elements go; ".." stays, because what it means depends on links, which
// only the kernel follows rightly.
func resolve(home string, path []byte) (string, error) {
	p := string(path)
	if p == "" || strings.IndexByte(p, 0) >= 0 {
		return "", unix.EINVAL
	}
	if p[0] != '/' {
		p = home + "/" + p
	}
	var b strings.Builder
	for _, element := range strings.Split(p, "/") {
		if element == "" || element == "." {
			continue
		}
		if len(element) > nameMax {
			return "", unix.ENAMETOOLONG
		}
		b.WriteByte('/')
		b.WriteString(element)
	}
	if b.Len() >= unix.PathMax {
		return "", unix.ENAMETOOLONG
	}
	if b.Len() == 0 {
		return "/", nil
	}
	return b.String(), nil
}

// split returns the folder and the last element of an absolute path. The root and ".." name no file to make.
func split(path string) (dir, name string, err error) {
	i := strings.LastIndexByte(path, '/')
	dir, name = path[:i], path[i+1:]
	if dir == "" {
		dir = "/"
	}
	if name == "" || name == ".." {
		return "", "", unix.EINVAL
	}
	return dir, name, nil
}

// nameMax is how long one element may be.
const nameMax = 255
