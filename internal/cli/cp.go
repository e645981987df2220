package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/url"
	"os"
	"path"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/space-sandbox/space/internal/client"
	"github.com/space-sandbox/space/internal/sandbox"
)

func (a *app) cpCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "cp SOURCE DESTINATION",
		Short: "Copy files and folders into or out of a sandbox",
		Long: `Copies between this machine and a sandbox; one side is written as SANDBOX:/path. Folders are copied with all they hold.
If the destination is a folder, the copy is made inside it. Links and special files are left out, with a word on standard error.`,
		Example: `  space cp main.py i3k9x0a7c2m5q8w1z4b6n:/home/user/main.py
  space cp i3k9x0a7c2m5q8w1z4b6n:/home/user/out ./out`,
		Args: cobra.ExactArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			fromID, from := remote(args[0])
			toID, to := remote(args[1])
			if (fromID == "") == (toID == "") {
				return errors.New("one of SOURCE and DESTINATION must be in a sandbox, written as SANDBOX:/path, and the other must not")
			}
			c, err := a.connect()
			if err != nil {
				return err
			}
			if toID != "" {
				return a.upload(cmd.Context(), c, from, toID, to)
			}
			return a.download(cmd.Context(), c, fromID, from, to)
		},
	}
}

// remote splits SANDBOX:/path; id is "" for a path of this machine.
func remote(arg string) (id, p string) {
	id, p, ok := strings.Cut(arg, ":")
	if _, err := sandbox.ParseID(id); !ok || err != nil {
		return "", arg
	}
	if p == "" {
		p = "."
	}
	return id, p
}

func (a *app) upload(ctx context.Context, c *client.Client, from, id, to string) error {
	info, err := os.Stat(from)
	if err != nil {
		return err
	}
	if e, err := c.Stat(ctx, id, to); err == nil && e.Type == "directory" {
		to = path.Join(to, filepath.Base(from))
	} else if err != nil && client.CodeOf(err) != sandbox.CodeNotFound {
		return fmt.Errorf("%s: %w", to, err)
	}
	if !info.IsDir() {
		return uploadFile(ctx, c, from, id, to)
	}
	// The folder that was named may be a link itself; those inside it are left out.
	if from, err = filepath.EvalSymlinks(from); err != nil {
		return err
	}
	return filepath.WalkDir(from, func(name string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(from, name)
		if err != nil {
			return err
		}
		target := path.Join(to, filepath.ToSlash(rel))
		switch {
		case d.IsDir():
			if err := c.MakeDirectory(ctx, id, target); err != nil {
				return fmt.Errorf("%s: %w", target, err)
			}
		case d.Type().IsRegular():
			return uploadFile(ctx, c, name, id, target)
		default:
			_, _ = fmt.Fprintf(a.errOut, "left out, neither file nor folder: %s\n", escape(name))
		}
		return nil
	})
}

func uploadFile(ctx context.Context, c *client.Client, from, id, to string) error {
	f, err := os.Open(from)
	if err != nil {
		return err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return err
	}
	size := int64(-1)
	if info.Mode().IsRegular() {
		size = info.Size()
	}
	if _, err := c.WriteFile(ctx, id, to, fmt.Sprintf("%04o", info.Mode().Perm()), size, f); err != nil {
		return fmt.Errorf("%s: %w", to, err)
	}
	return nil
}

// maxDepth is how deep a folder is listed.
const maxDepth = 64

func (a *app) download(ctx context.Context, c *client.Client, id, from, to string) error {
	e, err := c.Stat(ctx, id, from)
	if err != nil {
		return fmt.Errorf("%s: %w", from, err)
	}
	if info, err := os.Stat(to); err == nil && info.IsDir() {
		to = filepath.Join(to, path.Base(path.Clean("/"+from)))
	}
	if e.Type != "directory" {
		root, err := os.OpenRoot(filepath.Dir(to))
		if err != nil {
			return err
		}
		defer func() { _ = root.Close() }()
		return downloadFile(ctx, c, id, from, root, filepath.Base(to), e.Mode)
	}
	if err := os.MkdirAll(to, 0o755); err != nil {
		return err
	}
	// The names are the guest's: the root keeps them inside the destination.
	root, err := os.OpenRoot(to)
	if err != nil {
		return err
	}
	defer func() { _ = root.Close() }()
	entries, err := c.Files(ctx, id, from, maxDepth)
	if err != nil {
		return fmt.Errorf("%s: %w", from, err)
	}
	base, err := url.PathUnescape(e.PathEncoded)
	if err != nil {
		return fmt.Errorf("%s: odd path in the answer", from)
	}
	for _, entry := range entries {
		if err := a.downloadEntry(ctx, c, id, base, entry, root); err != nil {
			return err
		}
	}
	return nil
}

func (a *app) downloadEntry(ctx context.Context, c *client.Client, id, base string, e *client.Entry, root *os.Root) error {
	exact, err := url.PathUnescape(e.PathEncoded)
	if err != nil {
		return fmt.Errorf("%q: odd path in the answer", e.Path)
	}
	rel, ok := strings.CutPrefix(exact, strings.TrimSuffix(base, "/")+"/")
	if !ok || !filepath.IsLocal(rel) {
		return fmt.Errorf("%q: the path leaves the folder that is copied", e.Path)
	}
	switch e.Type {
	case "directory":
		return root.MkdirAll(rel, 0o755)
	case "file":
		return downloadFile(ctx, c, id, exact, root, rel, e.Mode)
	}
	_, _ = fmt.Fprintf(a.errOut, "left out, neither file nor folder: %s\n", escape(e.Path))
	return nil
}

func downloadFile(ctx context.Context, c *client.Client, id, from string, root *os.Root, name, mode string) error {
	r, err := c.ReadFile(ctx, id, from)
	if err != nil {
		return fmt.Errorf("%s: %w", from, err)
	}
	defer r.Close()
	perm, err := strconv.ParseUint(mode, 8, 32)
	if err != nil {
		perm = 0o644
	}
	f, err := root.OpenFile(name, os.O_CREATE|os.O_WRONLY|os.O_TRUNC, fs.FileMode(perm&0o777)|0o200)
	if err != nil {
		return err
	}
	if _, err := io.Copy(f, r); err != nil {
		_ = f.Close()
		return fmt.Errorf("%s: %w", from, err)
	}
	return f.Close()
}
