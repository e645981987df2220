package config

import (
	"fmt"
	"reflect"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/pflag"
)

// Setting is one field of a Config. It implements pflag.Value.
type Setting struct {
	Flag    string // such as "data-dir"
	Env     string // such as "SPACE_DATA_DIR"
	Key     string // in the file, such as "data_dir"
	Default string
	Doc     string
	field   reflect.Value
	set     bool
}

// Settings returns the settings of c and gives them their defaults.
func Settings(c *Config) ([]*Setting, error) {
	v := reflect.ValueOf(c).Elem()
	var out []*Setting
	for i := range v.NumField() {
		tag := v.Type().Field(i).Tag
		name := tag.Get("flag")
		key := strings.ReplaceAll(name, "-", "_")
		s := &Setting{Flag: name, Env: "SPACE_" + strings.ToUpper(key), Key: key, Default: tag.Get("default"), Doc: tag.Get("doc"), field: v.Field(i)}
		if s.Default != "" {
			if err := s.assign(s.Default); err != nil {
				return nil, fmt.Errorf("default of %s: %w", name, err)
			}
		}
		out = append(out, s)
	}
	return out, nil
}

// AddFlags registers every setting as a flag.
func AddFlags(flags *pflag.FlagSet, settings []*Setting) {
	for _, s := range settings {
		f := flags.VarPF(s, s.Flag, "", s.Doc)
		if s.Type() == "bool" {
			f.NoOptDefVal = "true"
		}
	}
}

// Apply takes over the environment and the file for whatever no flag has set. path "" means no file.
func Apply(settings []*Setting, lookup func(string) (string, bool), path string) error {
	values, err := readFile(path, settings)
	if err != nil {
		return err
	}
	for _, s := range settings {
		if s.set {
			continue
		}
		if text, ok := lookup(s.Env); ok && text != "" {
			if err := s.assign(text); err != nil {
				return fmt.Errorf("environment variable %s: %w", s.Env, err)
			}
			continue
		}
		if text, ok := values[s.Key]; ok {
			if err := s.assign(text); err != nil {
				return fmt.Errorf("%s: %s: %w", path, s.Key, err)
			}
		}
	}
	return nil
}

// Set implements pflag.Value.
func (s *Setting) Set(text string) error {
	s.set = true
	return s.assign(text)
}

// String implements pflag.Value.
func (s *Setting) String() string {
	if s == nil || !s.field.IsValid() {
		return ""
	}
	if list, ok := s.field.Interface().([]string); ok {
		return strings.Join(list, ",")
	}
	return fmt.Sprint(s.field.Interface())
}

// Type implements pflag.Value.
func (s *Setting) Type() string {
	switch s.field.Interface().(type) {
	case bool:
		return "bool"
	case int:
		return "int"
	case time.Duration:
		return "duration"
	case []string:
		return "list"
	}
	return "string"
}

func (s *Setting) assign(text string) error {
	var value any
	var err error
	switch s.Type() {
	case "bool":
		value, err = strconv.ParseBool(text)
	case "int":
		value, err = strconv.Atoi(text)
	case "duration":
		value, err = time.ParseDuration(text)
	case "list":
		list := []string{}
		for item := range strings.SplitSeq(text, ",") {
			if item = strings.TrimSpace(item); item != "" {
				list = append(list, item)
			}
		}
		value = list
	default:
		value = text
	}
	if err != nil {
		return fmt.Errorf("%q is no %s", text, s.Type())
	}
	s.field.Set(reflect.ValueOf(value))
	return nil
}
