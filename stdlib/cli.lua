-- The words of the command line, and who takes them: a script's dt.args takes the names that it declares, dtrain's
-- own options take the rest, and what neither knows is an error. Words before the script are dtrain's only.
local util = require "dtrain.util"

local cli = {
  words = nil,     -- words after the script that nobody has taken yet; nil: not started by the program dtrain
  given = {},      -- dtrain's options by name
  declared = {},   -- names that the script declared, in order
  chosen = {},     -- their values: name -> what the script got
  verb = "run",
}

--- dtrain's own options: name, kind, what help says.
cli.own = {
  { "steps", "count", "optimizer steps to train" },
  { "epochs", "count", "passes over the data instead of steps" },
  { "seed", "integer", "of initial values, order and dropout" },
  { "threads", "count", "threads of each rank (default: the host's cores / its ranks)" },
  { "device", "string", "cpu, cuda, or auto: a GPU where all ranks have one (default: the job's, else cpu)" },
  { "out", "string", "folder for metrics.jsonl and checkpoints" },
  { "resume", "string", "auto (newest checkpoint, if any), a checkpoint's folder, or a run's" },
  { "resume_with", "string", "what may differ from the checkpoint's run: batch,seed,... or all" },
  { "overwrite", "boolean", "remove what another run has left in the folders of this one" },
  { "parallel", "string", "over the script's `parallel`: zero=2,recompute.every=2; none: nothing of it" },
  { "trace", "string", "file for a timeline of the run (Perfetto, chrome://tracing)" },
  { "trace_steps", "string", "only these steps in it, as 10-12" },
  { "quiet", "boolean", "print errors only" },
  { "verbose", "boolean", "print the model, the plan's memory and every step" },
  { "help", "boolean", "this text" },
}

local extra = {} -- options of the verb at hand

--- Adds options that only the current verb has.
function cli.add(rows) for _, row in ipairs(rows) do extra[#extra + 1] = row end end

local function row_of(name)
  for _, list in ipairs { cli.own, extra } do
    for _, row in ipairs(list) do
      if row[1] == name then return row end
    end
  end
end

local function known_names()
  local out = {}
  for _, n in ipairs(cli.declared) do out[#out + 1] = "--" .. n:gsub("_", "-") end
  for _, list in ipairs { cli.own, extra } do
    for _, row in ipairs(list) do out[#out + 1] = "--" .. row[1]:gsub("_", "-") end
  end
  return out
end

local function fail(fmt, ...) error("dtrain: " .. fmt:format(...), 0) end

local function unknown(word)
  fail("unknown option %s; did you mean %s? --help lists all", word, util.nearest(word:match("^[^=]*"), known_names()))
end

--- Text to a value of a kind, or nil.
function cli.convert(text, kind)
  if kind == "string" then return text end
  if kind == "boolean" then
    local words = { ["true"] = true, yes = true, ["1"] = true, ["false"] = false, no = false, ["0"] = false }
    return words[text]
  end
  local n = tonumber(text)
  if kind == "number" then return n end
  n = n and math.tointeger(n)
  if kind == "count" and n and n < 1 then return nil end
  return n
end

local kinds = { count = "a whole number of at least 1", integer = "a whole number", number = "a number",
  boolean = "true or false" }

--- Splits "--name=value" and finds the value of an option of a kind at words[i]: returns the value and the index of
--- the last word used. `shown` is the option as typed.
function cli.value(words, i, kind, shown)
  local text = words[i]:match("^%-%-[^=]+=(.*)$")
  if kind == "boolean" and not text then return true, i end
  if not text then
    i = i + 1
    text = words[i]
    if not text then fail("%s needs a value (%s)", shown, kinds[kind] or "text") end
  end
  local v = cli.convert(text, kind)
  if v == nil then fail("%s wants %s, got '%s'", shown, kinds[kind] or kind, text) end
  return v, i
end

--- The name of "--some-name=3": "some_name"; nil for a word that is no option.
function cli.name(word)
  local name = word:match("^%-%-([^=]+)")
  if word == "-h" then name = "help" end
  return name and name:gsub("-", "_")
end

--- Takes dtrain's options out of a list of words; returns what is left over. stop(word): ends at the first plain word.
function cli.take(words, stop)
  local i, rest = 1, {}
  while i <= #words do
    local name = cli.name(words[i])
    if not name then
      if stop then return table.move(words, i, #words, 1, {}) end
      rest[#rest + 1] = words[i]
    else
      local row = row_of(name)
      if not row then unknown(words[i]) end
      cli.given[name], i = cli.value(words, i, row[2], "--" .. row[1]:gsub("_", "-"))
    end
    i = i + 1
  end
  return rest
end

--- An option of dtrain's that a script's part needs before the script has ended: the last one given, not taken yet.
function cli.peek(name, kind)
  local words, found = cli.words or {}, cli.given[name]
  for i = 1, #words do
    if cli.name(words[i]) == name then found = cli.value(words, i, kind, "--" .. name) end
  end
  return found
end

-- "a=1,b.c=x" -> { a = 1, b = { c = "x" } }; "x+y" is a list.
local function set(into, key, text)
  local function value(t)
    if t == "true" or t == "false" then return t == "true" end
    return math.tointeger(tonumber(t)) or tonumber(t) or t
  end
  local first, rest = key:match("^([^.]+)%.(.+)$")
  if first then
    if type(into[first]) ~= "table" then into[first] = {} end
    return set(into[first], rest, text)
  end
  if not text:find("%+") then
    into[key] = value(text)
    return
  end
  into[key] = {}
  for part in text:gmatch("[^+]+") do table.insert(into[key], value(part)) end
end

-- What is left of a script's `parallel` when --parallel says none: its own strategies with the defaults of their options and axes of
-- one rank, so that what they change in the training, or offer to --parallel, stays.
local function nothing_of(given)
  return { strategies = given.strategies and util.map(given.strategies, function(s)
    local out, axes = util.copy(s), s.axes
    out.axes = axes and function(p)
      return util.map(axes(p), function(axis) return { name = axis.name, size = 1, splits = axis.splits } end)
    end
    return out
  end) }
end

--- `given`, a script's `parallel`, with what --parallel says laid over it.
function cli.parallel(given)
  local text = cli.peek("parallel", "string")
  if not text then return given end
  local out = util.copy(given)
  for key, v in util.sorted(out) do
    if type(v) == "table" and getmetatable(v) == nil then out[key] = util.copy(v) end
  end
  for item in text:gmatch("[^,]+") do
    local key, value = item:match("^%s*([%a_][%w_.]*)=(.+)$")
    if item == "none" then
      out = nothing_of(given)
    elseif not key then
      fail("--parallel wants key=value,key=value, got '%s'; zero=2,recompute=full would do", item)
    else
      set(out, key, value)
    end
  end
  return out
end

--- dtrain's options, checked; called when the script has declared its own (by dt.engine, or after it ended).
function cli.options()
  if cli.words then
    local words = cli.words
    cli.words = {}
    local rest = cli.take(words)
    if rest[1] then fail("unexpected '%s' after the script; options begin with -- (--help lists them)", rest[1]) end
  end
  local o = cli.given
  if o.device and o.device ~= "cpu" and o.device ~= "cuda" and o.device ~= "auto" then
    fail("--device %s is unknown; cpu, cuda and auto work", o.device)
  end
  if o.trace == "" then fail("--trace wants the name of a file; --trace run.json would do") end
  if o.trace_steps then
    if not o.trace then fail("--trace-steps says which steps --trace writes; give --trace FILE, too") end
    local a, b = o.trace_steps:match("^(%d+)%-?(%d*)$")
    o.first_traced, o.last_traced = math.tointeger(tonumber(a)), math.tointeger(tonumber(b ~= "" and b or a))
    if not o.first_traced or not o.last_traced or o.first_traced < 1 or o.last_traced < o.first_traced then
      fail("--trace-steps wants steps from 1 on, as 10-12 or 10, got '%s'", o.trace_steps)
    end
  end
  if o.steps and o.epochs then fail("--steps and --epochs exclude each other; give one") end
  if o.quiet and o.verbose then fail("--quiet and --verbose exclude each other; give one") end
  return o
end

--- The number of ranks that a script is written for: those that run, or those that --ranks asks `plan`, `explain` and
--- `check` about.
function cli.world()
  local asked = (cli.verb == "plan" or cli.verb == "explain" or cli.verb == "check") and cli.peek("ranks", "count")
  return asked or require "dtrain.core".size()
end

--- The help lines of dtrain's own options.
function cli.help_lines()
  local out = {}
  for _, list in ipairs { cli.own, extra } do
    for _, row in ipairs(list) do
      local left = "--" .. row[1]:gsub("_", "-") .. (row[2] == "boolean" and "" or row[2] == "string" and " WORD" or " N")
      out[#out + 1] = ("  %-22s %s"):format(left, row[3])
    end
  end
  return out
end

return cli
