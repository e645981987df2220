package api

import (
	"net/http"
	"net/url"
	"sort"
	"strings"
)

// router finds a route by its path: a tree of literal and variable segments. Unlike http.ServeMux it never redirects
// and leaves the answers for unknown paths and methods to the API. It is filled once and then only read.
type router struct{ root *node }

type node struct {
	literal  map[string]*node
	variable *node
	name     string // of the variable
	methods  map[string]*route
}

func newRouter() *router { return &router{root: &node{}} }

func (t *router) add(r *route) {
	n := t.root
	for _, segment := range strings.Split(strings.TrimPrefix(r.path, "/"), "/") {
		if name, ok := strings.CutPrefix(segment, "{"); ok {
			if n.variable == nil {
				n.variable = &node{name: strings.TrimSuffix(name, "}")}
			}
			n = n.variable
			continue
		}
		if n.literal == nil {
			n.literal = map[string]*node{}
		}
		if n.literal[segment] == nil {
			n.literal[segment] = &node{}
		}
		n = n.literal[segment]
	}
	if n.methods == nil {
		n.methods = map[string]*route{}
	}
	n.methods[r.method] = r
}

// find returns the node of an escaped path and the values of its variables, or nil.
func (t *router) find(path string) (*node, map[string]string) {
	values := map[string]string{}
	n := t.root
	for _, segment := range strings.Split(strings.TrimPrefix(path, "/"), "/") {
		if next := n.literal[segment]; next != nil {
			n = next
			continue
		}
		value, err := url.PathUnescape(segment)
		if n.variable == nil || err != nil || value == "" {
			return nil, nil
		}
		n = n.variable
		values[n.name] = value
	}
	if n.methods == nil {
		return nil, nil
	}
	return n, values
}

// allow lists the methods of a node.
func (n *node) allow() string {
	var list []string
	for m := range n.methods {
		list = append(list, m)
		if m == http.MethodGet {
			list = append(list, http.MethodHead)
		}
	}
	sort.Strings(list)
	return strings.Join(list, ", ")
}
