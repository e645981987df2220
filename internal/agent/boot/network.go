package boot

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"os"
	"runtime"

	"github.com/space-sandbox/space/internal/vmm"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

func setupWorkload() error {
	h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return err
	}
	defer h.Close()
	if err := loopback(h); err != nil {
		return err
	}
	link, err := configure(h, vmm.WorkloadMAC, vmm.WorkloadGuest, 0)
	if err != nil {
		return err
	}
	gw := net.ParseIP(vmm.WorkloadHost)
	if err := h.RouteAdd(&netlink.Route{LinkIndex: link.Attrs().Index, Gw: gw}); err != nil {
		return fmt.Errorf("default route: %w", err)
	}
	return writeResolver("/etc/resolv.conf")
}

// writeResolver replaces whatever is there, a link too. Without a search list short names stay local.
func writeResolver(path string) error {
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	if err := os.MkdirAll("/etc", 0o755); err != nil {
		return err
	}
	return os.WriteFile(path, []byte("nameserver "+vmm.WorkloadHost+"\n"), 0o644)
}

// listenControl moves the control device into a new network namespace and listens there. The namespace belongs to a
// thread that ends here; the device and the listener keep it, and no process of the guest can find it by name.
// The caller's goroutine must not be on the main thread's account: a main thread in the namespace would show it in
// /proc/1/ns/net.
func listenControl() (net.Listener, error) {
	type result struct {
		l   net.Listener
		err error
	}
	done := make(chan result, 1)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
		if unix.Gettid() == unix.Getpid() {
			done <- result{err: errors.New("the control namespace would be the main thread's")}
			return
		}
		l, err := control()
		done <- result{l, err}
	}()
	r := <-done
	return r.l, r.err
}

func control() (net.Listener, error) {
	outer, err := netlink.NewHandle(unix.NETLINK_ROUTE) // stays in the namespace it was made in
	if err != nil {
		return nil, err
	}
	defer outer.Close()
	link, err := byMAC(outer, vmm.ControlMAC)
	if err != nil {
		return nil, err
	}
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		return nil, err
	}
	ns, err := os.Open("/proc/thread-self/ns/net")
	if err != nil {
		return nil, err
	}
	defer ns.Close()
	if err := outer.LinkSetNsFd(link, int(ns.Fd())); err != nil {
		return nil, fmt.Errorf("move the control device: %w", err)
	}
	inner, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return nil, err
	}
	defer inner.Close()
	if err := loopback(inner); err != nil {
		return nil, err
	}
	if _, err := configure(inner, vmm.ControlMAC, vmm.ControlGuest, vmm.LinkMTU); err != nil {
		return nil, err
	}
	return net.ListenTCP("tcp4", &net.TCPAddr{IP: net.ParseIP(vmm.ControlGuest), Port: vmm.AgentPort})
}

func loopback(h *netlink.Handle) error {
	lo, err := h.LinkByName("lo")
	if err != nil {
		return err
	}
	return h.LinkSetUp(lo)
}

// configure gives the device with a MAC its address in a /30 and brings it up.
func configure(h *netlink.Handle, mac, ip string, mtu int) (netlink.Link, error) {
	link, err := byMAC(h, mac)
	if err != nil {
		return nil, err
	}
	if mtu > 0 {
		if err := h.LinkSetMTU(link, mtu); err != nil {
			return nil, fmt.Errorf("mtu of %s: %w", mac, err)
		}
	}
	addr := &netlink.Addr{IPNet: &net.IPNet{IP: net.ParseIP(ip), Mask: net.CIDRMask(30, 32)}}
	if err := h.AddrAdd(link, addr); err != nil {
		return nil, fmt.Errorf("address of %s: %w", mac, err)
	}
	if err := h.LinkSetUp(link); err != nil {
		return nil, fmt.Errorf("bring up %s: %w", mac, err)
	}
	return link, nil
}

func byMAC(h *netlink.Handle, mac string) (netlink.Link, error) {
	want, err := net.ParseMAC(mac)
	if err != nil {
		return nil, err
	}
	links, err := h.LinkList()
	if err != nil {
		return nil, err
	}
	for _, l := range links {
		if bytes.Equal(l.Attrs().HardwareAddr, want) {
			return l, nil
		}
	}
	return nil, fmt.Errorf("no network device with address %s", mac)
}
