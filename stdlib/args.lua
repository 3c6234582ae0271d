-- dt.args{ lr = 3e-4, layers = 6, file = "x.txt", tied = true }: a script's own options, with types from the defaults:
-- `--lr 1e-3`, `--layers=4`, `--tied`, `--no-tied`. A default may be { default =, help =, choices = {} } to say more.
-- A whole number as default wants whole numbers; write 1.0 for a number with a fraction. `--help` lists them and
-- dtrain's own.
local cli = require "dtrain.cli"
local core = require "dtrain.core"
local util = require "dtrain.util"

local function kind_of(v)
  if type(v) == "number" then return math.type(v) == "integer" and "integer" or "number" end
  return type(v)
end

local function print_help(rows)
  if core.rank() == 0 then
    print("options of " .. (core.script() or "the script") .. ":")
    for _, row in ipairs(rows) do
      local left = "--" .. row.name:gsub("_", "-") .. (row.kind == "boolean" and "" or row.kind == "string" and " WORD"
        or " N")
      local text = row.help and row.help .. " " or ""
      if row.choices then text = text .. "(" .. table.concat(util.map(row.choices, tostring), ", ") .. ") " end
      local default = row.default
      if type(default) == "string" and default == "" then default = '""' end
      print(("  %-22s %sdefault %s"):format(left, text, tostring(default)))
    end
    print("options of dtrain:")
    for _, line in ipairs(cli.help_lines()) do print(line) end
  end
  os.exit(0)
end

return function(spec)
  util.check("dt.args", spec, "table")
  local rows, by_name, out = {}, {}, {}
  for name, default in util.sorted(spec) do
    if type(name) ~= "string" or not name:find("^[%a_][%w_]*$") then
      util.fail("dt.args wants names, got %s; write dt.args { lr = 3e-4 }", util.show(name))
    end
    local row = { name = name, default = default }
    if type(default) == "table" then
      local o = util.options("dt.args: " .. name, default,
        { { "default", "any", required = true }, { "help", "string" },
        { "choices", "table" } })
      row.default, row.help, row.choices = o.default, o.help, o.choices
    end
    row.kind = kind_of(row.default)
    if row.kind ~= "integer" and row.kind ~= "number" and row.kind ~= "string" and row.kind ~= "boolean" then
      util.fail("dt.args: %s has a default of type %s; a number, text, true or false would do", name, type(row.default))
    end
    rows[#rows + 1] = row
    by_name[name] = row
    out[name] = row.default
    cli.declared[#cli.declared + 1] = name
  end
  if cli.words == nil then
    local words = rawget(_G, "arg")
    cli.words = type(words) == "table" and table.move(words, 1, #words, 1, {}) or {}
  end
  local words, rest, i = cli.words, {}, 1
  while i <= #words do
    local name = cli.name(words[i])
    local row = name and by_name[name]
    local off = name and not row and name:match("^no_(.+)$")
    if row then
      local shown = "--" .. name:gsub("_", "-")
      local value
      value, i = cli.value(words, i, row.kind, shown)
      if row.choices then
        local ok = false
        for _, c in ipairs(row.choices) do ok = ok or c == value end
        if not ok then
          error(("dtrain: %s %s is unknown; did you mean '%s'? (known: %s)"):format(shown, tostring(value),
            util.nearest(tostring(value), util.map(row.choices, tostring)),
            table.concat(util.map(row.choices, tostring), ", ")), 0)
        end
      end
      out[name] = value
    elseif off and by_name[off] and by_name[off].kind == "boolean" then
      out[off] = false
    elseif name == "help" then
      print_help(rows)
    else
      rest[#rest + 1] = words[i]
    end
    i = i + 1
  end
  cli.words = rest
  for name, v in util.sorted(out) do cli.chosen[name] = v end
  return setmetatable(out, { __index = function(_, key)
    local known = util.map(rows, function(row) return row.name end)
    util.fail("the script's dt.args has no '%s'; %s", tostring(key), util.suggest(tostring(key), known))
  end })
end
