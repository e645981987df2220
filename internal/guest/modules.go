package guest

import (
	"bytes"
	"debug/elf"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
)

// ErrModule means that the kernel package lacks a module, or one cannot be read.
var ErrModule = errors.New("kernel module")

// required is what the agent cannot start a guest without, in load order.
var required = []string{"virtio_ring", "virtio", "virtio_mmio", "virtio_blk", "failover", "net_failover",
	"virtio_net", "virtio_rng", "overlay"}

// extra is what workloads may want; dependencies are added.
var extra = []string{"fuse", "tun", "inet_diag", "tcp_diag", "unix_diag", "nf_tables", "nft_compat", "ip_tables",
	"iptable_filter", "iptable_nat", "xt_MASQUERADE", "xt_conntrack", "sunrpc", "nfs", "nfsv3", "veth", "bridge", "loop"}

// module is one loadable module of a kernel.
type module struct {
	Name    string
	Path    string // "lib/modules/<version>/kernel/..." without a compression suffix
	Depends []string
	Data    []byte // the ELF object
}

// moduleSet finds modules by name in an unpacked kernel package.
type moduleSet struct {
	root   string            // of the package
	files  map[string]string // name to path below root
	loaded map[string]module
}

// moduleName is how the kernel names the module in a file.
func moduleName(file string) string {
	base := filepath.Base(file)
	if i := strings.Index(base, ".ko"); i >= 0 {
		base = base[:i]
	}
	return strings.ReplaceAll(base, "-", "_")
}

// findModules lists the modules of the one kernel below root.
func findModules(root, version string) (*moduleSet, error) {
	s := &moduleSet{root: root, files: map[string]string{}, loaded: map[string]module{}}
	top := filepath.Join(root, "lib/modules", version)
	err := filepath.WalkDir(top, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || !strings.Contains(d.Name(), ".ko") {
			return err
		}
		rel, err := filepath.Rel(root, path)
		s.files[moduleName(path)] = rel
		return err
	})
	return s, err
}

// load reads one module, decompressing it.
func (s *moduleSet) load(name string) (module, error) {
	if m, ok := s.loaded[name]; ok {
		return m, nil
	}
	rel, ok := s.files[name]
	if !ok {
		return module{}, fmt.Errorf("%w %s is not in this kernel package", ErrModule, name)
	}
	data, err := os.ReadFile(filepath.Join(s.root, rel))
	if err != nil {
		return module{}, err
	}
	if data, err = decompress(rel, data); err != nil {
		return module{}, fmt.Errorf("%w %s: %w", ErrModule, name, err)
	}
	depends, err := moduleDepends(data)
	if err != nil {
		return module{}, fmt.Errorf("%w %s: %w", ErrModule, name, err)
	}
	m := module{Name: name, Path: withoutCompression(rel), Depends: depends, Data: data}
	s.loaded[name] = m
	return m, nil
}

// withoutCompression is the path of a module with what follows ".ko" cut off.
func withoutCompression(file string) string {
	before, _, _ := strings.Cut(file, ".ko")
	return before + ".ko"
}

// moduleDepends reads the "depends=" entry of a module's information section.
func moduleDepends(object []byte) ([]string, error) {
	f, err := elf.NewFile(bytes.NewReader(object))
	if err != nil {
		return nil, err
	}
	section := f.Section(".modinfo")
	if section == nil {
		return nil, errors.New("no .modinfo section")
	}
	info, err := section.Data()
	if err != nil {
		return nil, err
	}
	for _, entry := range strings.Split(string(info), "\x00") {
		list, ok := strings.CutPrefix(entry, "depends=")
		if !ok || list == "" {
			continue
		}
		depends := strings.Split(list, ",")
		for i := range depends {
			depends[i] = strings.ReplaceAll(depends[i], "-", "_")
		}
		return depends, nil
	}
	return nil, nil
}

// order returns modules so that each comes after what it depends on, otherwise as given. Names in optional that the
// kernel does not have are left out: they may be built in.
func (s *moduleSet) order(names []string, optional bool) ([]module, error) {
	var out []module
	done, doing := map[string]bool{}, map[string]bool{}
	var visit func(name string) error
	visit = func(name string) error {
		if done[name] {
			return nil
		}
		if doing[name] {
			return fmt.Errorf("%w %s depends on itself", ErrModule, name)
		}
		doing[name] = true
		m, err := s.load(name)
		if err != nil {
			return err
		}
		for _, d := range m.Depends {
			if err := visit(d); err != nil {
				return err
			}
		}
		done[name] = true
		out = append(out, m)
		return nil
	}
	for _, name := range names {
		if _, ok := s.files[name]; !ok && optional {
			continue
		}
		if err := visit(name); err != nil {
			return nil, err
		}
	}
	return out, nil
}
