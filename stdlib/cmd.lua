-- The command line: `dtrain [verb] [options] [script.lua] [options]`. Called by the program with the list of words;
-- returns the exit code.
local cli = require "dtrain.cli"
local util = require "dtrain.util"

local verbs = {
  { "run", "train what the script declares (a script's name alone does the same)" },
  { "plan", "memory of each rank, to the byte; no training" },
  { "explain", "every collective with its bytes, reason and line" },
  { "check", "trains a few steps on --ranks N and in one process, and compares losses, gradients and values" },
  { "devices", "the GPUs that this host has, or what is missing to use one" },
  { "repl", "a prompt with tensors" },
  { "version", "what is installed" },
  { "help", "this text" },
}

local function verb_names() return util.map(verbs, function(v) return v[1] end) end

local function help()
  print("usage: dtrain [verb] [options] script.lua [options]\n")
  print("  dtrain train.lua --steps 100          trains; mpirun -n 4 dtrain train.lua: on 4 ranks")
  print("  dtrain plan train.lua --ranks 4       memory of each rank\n")
  print("verbs:")
  for _, v in ipairs(verbs) do print(("  %-22s %s"):format(v[1], v[2])) end
  print("options:")
  for _, line in ipairs(cli.help_lines()) do print(line) end
  print("\nA script's own options follow its name; dtrain script.lua --help lists them.")
  return 0
end

local function fail(fmt, ...) error("dtrain: " .. fmt:format(...), 0) end

return function(words)
  local verb = words[1]
  local rest = words
  if verb == nil or verb == "help" or verb == "--help" or verb == "-h" then return help() end
  if verb == "version" or verb == "--version" then return require "dtrain.cmd.version"() end
  local known = false
  for _, v in ipairs(verbs) do known = known or v[1] == verb end
  if known then
    rest = table.move(words, 2, #words, 1, {})
  elseif verb:find("^%-") or verb:find("%.lua$") or require "dtrain.core".exists(verb) then
    verb = "run"
  else
    fail("no verb and no script '%s'; did you mean '%s'? dtrain help lists the verbs", verb,
      util.nearest(verb, verb_names()))
  end
  cli.verb = verb
  if verb == "plan" or verb == "explain" then cli.add { { "ranks", "count",
    "ranks to plan for (default: those that run)" } } end
  if verb == "explain" then
    cli.add { { "rank", "integer", "whose step (default: 0)" }, { "json", "boolean", "as JSON, for programs" },
      { "passes", "boolean", "the passes that made the plan: nodes before and after, and time" } }
  end
  if verb == "check" then cli.add(require "dtrain.cmd.check_options") end
  rest = cli.take(rest, true)
  if cli.given.help then return help() end
  return require("dtrain.cmd." .. verb)(rest) or 0
end
