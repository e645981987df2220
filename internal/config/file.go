package config

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/pelletier/go-toml/v2"
	"go.yaml.in/yaml/v3"
)

// maxFile bounds a configuration file.
const maxFile = 1 << 20

// readFile returns the values of a YAML or TOML file as text.
func readFile(path string, settings []*Setting) (map[string]string, error) {
	if path == "" {
		return nil, nil
	}
	info, err := os.Stat(path)
	if err != nil {
		return nil, fmt.Errorf("configuration file: %w", err)
	}
	if info.Size() > maxFile {
		return nil, fmt.Errorf("configuration file %s is larger than 1 MiB", path)
	}
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("configuration file: %w", err)
	}
	values, err := parse(data, filepath.Ext(path), settings)
	if err != nil {
		return nil, fmt.Errorf("configuration file %s: %w", path, err)
	}
	return values, nil
}

// parse reads the content of a file; ext tells its language.
func parse(data []byte, ext string, settings []*Setting) (map[string]string, error) {
	raw := map[string]any{}
	switch ext {
	case ".yaml", ".yml":
		if err := yaml.Unmarshal(data, &raw); err != nil {
			return nil, err
		}
	case ".toml":
		if err := toml.Unmarshal(data, &raw); err != nil {
			return nil, err
		}
	default:
		return nil, fmt.Errorf("the name must end in .yaml, .yml or .toml")
	}
	out := map[string]string{}
	for key, value := range raw {
		i := slices.IndexFunc(settings, func(s *Setting) bool { return s.Key == key })
		if i < 0 {
			return nil, fmt.Errorf("unknown key %q", key)
		}
		text, err := textOf(value)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", key, err)
		}
		out[key] = text
	}
	return out, nil
}

func textOf(value any) (string, error) {
	switch v := value.(type) {
	case string, bool, int, int64, uint64, float64:
		return fmt.Sprint(v), nil
	case []any:
		items := make([]string, 0, len(v))
		for _, item := range v {
			s, ok := item.(string)
			if !ok || strings.Contains(s, ",") {
				return "", fmt.Errorf("the list must hold texts without commas")
			}
			items = append(items, s)
		}
		return strings.Join(items, ","), nil
	}
	return "", fmt.Errorf("must be a text, a number, true or false, or a list of texts")
}
