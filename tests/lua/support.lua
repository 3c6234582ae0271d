-- What the specs that start programs share: folders for their files, commands with a time limit, ranks.
local support = {}

local function lines_of(command)
  local p <close> = assert(io.popen(command))
  return p:read("a")
end

support.root = lines_of("pwd"):gsub("\n", "")
support.build = os.getenv("DT_BUILD") or support.root .. "/build"
support.dtrain = support.build .. "/dtrain"

function support.quote(s) return "'" .. tostring(s):gsub("'", "'\\''") .. "'" end

--- A new folder; all of them go when the process ends.
local folders = setmetatable({}, { __gc = function(list)
  for _, dir in ipairs(list) do os.execute("rm -rf " .. support.quote(dir)) end
end })
function support.folder()
  local dir = lines_of("mktemp -d"):gsub("\n", "")
  folders[#folders + 1] = dir
  return dir
end

function support.write(path, text)
  local f <close> = assert(io.open(path, "wb"))
  assert(f:write(text))
end

function support.read(path)
  local f = io.open(path, "rb")
  if not f then return nil end
  local text = f:read("a")
  f:close()
  return text
end

--- Names of the files below a folder, sorted, one string.
function support.list(dir) return lines_of("cd " .. support.quote(dir) .. " && find . -type f | LC_ALL=C sort") end

local function now()
  local f <close> = assert(io.open("/proc/uptime"))
  return f:read("n")
end

--- Runs a shell command; returns its exit code (124 when it ran longer than options.seconds, default 60), what it
--- printed on both channels, and the seconds it took. options: dir, env (text before the command), ranks (through
--- tests/tools/ranks).
function support.sh(command, options)
  options = options or {}
  local out = os.tmpname()
  local line = ("timeout -k 5 %g %s"):format(options.seconds or 60,
    options.ranks and ("%s/tests/tools/ranks %d %s"):format(support.root, options.ranks, command) or command)
  if options.env then line = "env " .. options.env .. " " .. line end
  if options.dir then line = "cd " .. support.quote(options.dir) .. " && " .. line end
  local t = now()
  local _, how, code = os.execute(line .. " > " .. out .. " 2>&1 < /dev/null")
  t = now() - t
  local text = support.read(out)
  os.remove(out)
  return how == "signal" and 128 + code or code, text, t
end

--- Runs the program: support.run("script.lua --steps 3", { ranks = 2 }), like support.sh.
function support.run(words, options) return support.sh(support.quote(support.dtrain) .. " " .. words, options) end

--- The length of a - b over that of b, of two tensors.
function support.distance(a, b)
  a, b = a:to "f64", b:to "f64"
  local d = a - b
  return math.sqrt((d * d):sum():item()) / math.max(math.sqrt((b * b):sum():item()), 1e-30)
end

--- The objects of a metrics.jsonl that have the key, as a list of numbers.
function support.metric(path, key)
  local out = {}
  for line in io.lines(path) do
    local v = line:match('"' .. key .. '":([^,}]+)')
    if v then out[#out + 1] = tonumber(v) end
  end
  return out
end

return support
