package users

import (
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"syscall"
	"testing"
)

const (
	passwdText = "root:x:0:0:root:/root:/bin/bash\nbroken\nuser:x:1000:1000::/home/user:\nuser:x:1:1::/:/bin/sh\n" +
		"big:x:4294967295:1::/:\nrel:x:1001:1001::rel:/bin/sh\n"
	groupText = "root:x:0:\nuser:x:1000:\nwheel:x:10:other,user\n:x:3:user\naudio:x:x:user\nvideo:x:44:user,\n"
)

func newDB(t *testing.T) (*DB, string) {
	t.Helper()
	root := t.TempDir()
	if err := os.Mkdir(filepath.Join(root, "etc"), 0o755); err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string]string{"passwd": passwdText, "group": groupText} {
		if err := os.WriteFile(filepath.Join(root, "etc", name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return New(root, "user"), root
}

func TestLookup(t *testing.T) {
	db, _ := newDB(t)
	user := User{Name: "user", UID: 1000, GID: 1000, Groups: []uint32{10, 44}, Home: "/home/user", Shell: "/bin/sh"}
	for name, want := range map[string]User{
		"": user, "user": user, "1000": user,
		"root": {Name: "root", Home: "/root", Shell: "/bin/bash"},
		"rel":  {Name: "rel", UID: 1001, GID: 1001, Home: "/", Shell: "/bin/sh"},
		"5":    {Name: "5", UID: 5, GID: 5, Home: "/", Shell: "/bin/sh"},
	} {
		if got, err := db.Lookup(name); err != nil || !reflect.DeepEqual(got, want) {
			t.Errorf("%q: %+v %v", name, got, err)
		}
	}
	for _, name := range []string{"big", "broken", "nobody", "-1", "4294967295", "4294967296", "0x1"} {
		if got, err := db.Lookup(name); !errors.Is(err, ErrUnknown) {
			t.Errorf("%q: %+v %v", name, got, err)
		}
	}
	n := db.Names()
	if n.User(1000) != "user" || n.User(9) != "9" || n.Group(10) != "wheel" || n.Group(9) != "9" {
		t.Error("names")
	}
}

func TestChangesAreSeen(t *testing.T) {
	db, root := newDB(t)
	if _, err := db.Lookup("new"); !errors.Is(err, ErrUnknown) {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(root, "etc/passwd"), []byte("new:x:7:7::/:/bin/sh\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	if u, err := db.Lookup("new"); err != nil || u.UID != 7 {
		t.Errorf("%+v %v", u, err)
	}
}

func TestNoFilesAndPipes(t *testing.T) {
	root := t.TempDir()
	if _, err := New(root, "user").Lookup(""); !errors.Is(err, ErrUnknown) {
		t.Error(err)
	}
	if err := os.Mkdir(filepath.Join(root, "etc"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Mkfifo(filepath.Join(root, "etc/passwd"), 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := New(root, "user").Lookup(""); !errors.Is(err, ErrUnknown) {
		t.Error(err)
	}
}

func FuzzParse(f *testing.F) {
	f.Add(passwdText, groupText)
	f.Add("::::::\n", ":::\n")
	f.Fuzz(func(t *testing.T, passwd, group string) {
		n := parse(passwd, group)
		for name, u := range n.byName {
			if name == "" || u.UID == 1<<32-1 || u.GID == 1<<32-1 || u.Home == "" || u.Home[0] != '/' || u.Shell == "" {
				t.Fatalf("%q: %+v", name, u)
			}
		}
	})
}
