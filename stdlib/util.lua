-- What every file of the library shares: positions in the user's script, errors, option tables, small text tools.
-- Errors read `file:line: what was wrong; what to do`; the position is the user's, never one of this library.
local util = {}

-- Where a script stands when no frame of it is on the stack (a job is traced after its script has returned).
util.fallback = nil
-- Modules being traced, innermost last; each knows the line that made it.
util.active = {}

--- "file:line" of the innermost frame that is not the library's, or nil.
function util.frame()
  local level = 2
  while true do
    local i = debug.getinfo(level, "S")
    if not i then return nil end
    if i.what ~= "C" and not i.source:find("^[=@]?stdlib/") then
      local line = debug.getinfo(level, "l").currentline
      if line > 0 then return (i.source:match("^[@=](.*)") or i.short_src) .. ":" .. line end
    end
    level = level + 1
  end
end

--- The position when no frame is the user's: the module being traced, else the job.
function util.beyond()
  local module = util.active[#util.active]
  return module and module.where or util.fallback
end

--- The position that an error gets: the user's frame, else the above.
function util.where() return util.frame() or util.beyond() end

--- The line at which a function is defined, "file:line"; nil for what is callable but no function.
function util.defined_at(f)
  local d = type(f) == "function" and debug.getinfo(f, "S")
  return d and ("%s:%d"):format(d.short_src, d.linedefined) or nil
end

--- Raises `where: text` where text = string.format(fmt, ...). `where` nil: the user's position now.
function util.fail_at(where, fmt, ...)
  local text = select("#", ...) > 0 and fmt:format(...) or fmt
  where = where or util.where()
  error(where and (where .. ": " .. text) or text, 0)
end

function util.fail(fmt, ...) util.fail_at(nil, fmt, ...) end

--- Calls f(...) with `where` as the position of errors that no frame of the script gives one.
function util.at(where, f, ...)
  local old = util.fallback
  util.fallback = where
  local results = table.pack(pcall(f, ...))
  util.fallback = old
  if not results[1] then error(results[2], 0) end
  return table.unpack(results, 2, results.n)
end

--- Keys of a table in a fixed order: numbers ascending, then strings. The only walk over a hash in this library.
function util.keys(t)
  local list = {}
  for k in next, t do list[#list + 1] = k end
  table.sort(list, function(a, b)
    local na, nb = type(a) == "number", type(b) == "number"
    if na ~= nb then return na end
    if na then return a < b end
    return tostring(a) < tostring(b)
  end)
  return list
end

--- Iterates over (key, value) in the order of util.keys.
function util.sorted(t)
  local list, i = util.keys(t), 0
  return function()
    i = i + 1
    local k = list[i]
    if k ~= nil then return k, t[k] end
  end
end

function util.copy(t)
  local out = {}
  for k, v in util.sorted(t) do out[k] = v end
  return out
end

function util.map(list, f)
  local out = {}
  for i = 1, #list do out[i] = f(list[i], i) end
  return out
end

--- The entries for which keep(entry) holds.
function util.filter(list, keep)
  local out = {}
  for _, v in ipairs(list) do if keep(v) then out[#out + 1] = v end end
  return out
end

function util.contains(list, x)
  for _, v in ipairs(list) do if v == x then return true end end
  return false
end

--- Whether x can be called: a function, or a table with __call.
function util.callable(x)
  if type(x) == "function" then return true end
  local meta = getmetatable(x)
  return type(meta) == "table" and meta.__call ~= nil
end

-- Edit distance with transpositions (optimal string alignment).
local function distance(a, b)
  local before, row = {}, {}
  for j = 0, #b do row[j] = j end
  for i = 1, #a do
    local now = { [0] = i }
    for j = 1, #b do
      local cost = a:byte(i) == b:byte(j) and 0 or 1
      now[j] = math.min(row[j] + 1, now[j - 1] + 1, row[j - 1] + cost)
      if i > 1 and j > 1 and a:byte(i) == b:byte(j - 1) and a:byte(i - 1) == b:byte(j) then
        now[j] = math.min(now[j], before[j - 2] + 1)
      end
    end
    before, row = row, now
  end
  return row[#b]
end

--- The known name nearest to `name`; the first of equals. nil for an empty list.
function util.nearest(name, known)
  local best, least
  local low = name:lower()
  for _, k in ipairs(known) do
    local d = distance(low, k:lower())
    if #low >= 3 and k:lower():sub(1, #low) == low then d = math.min(d, 1) end
    if not least or d < least then best, least = k, d end
  end
  return best
end

--- "did you mean 'lr'?" and, when few, the list of what is known.
function util.suggest(name, known)
  if #known == 0 then return "it takes none" end
  local hint = ("did you mean '%s'?"):format(util.nearest(tostring(name), known))
  if #known <= 12 then hint = hint .. " (known: " .. table.concat(known, ", ") .. ")" end
  return hint
end

--- A short, readable form of a value for messages.
function util.show(v)
  local meta = getmetatable(v)
  if type(v) == "string" then return ("%q"):format(v) end
  if type(v) == "table" and not (type(meta) == "table" and meta.__tostring) then
    if next(v) == nil then return "{}" end
    if #v > 0 and #v <= 8 then return "{" .. table.concat(util.map(v, util.show), ", ") .. "}" end
    return "a table"
  end
  if type(v) == "function" then return "a function" end
  return (tostring(v):match("^[^\n]*"))
end

--- The name of a value's kind as messages use it.
function util.kind(v)
  local meta = getmetatable(v)
  if type(meta) == "table" and type(meta.__name) == "string" then return (meta.__name:gsub("^dtrain%.", "")) end
  return type(v)
end

local kinds = {
  any = function() return true end,
  integer = function(v) return math.type(v) == "integer" or (type(v) == "number" and v == math.floor(v)
    and v - v == 0) end,
  count = function(v) return type(v) == "number" and v == math.floor(v) and v >= 1 and v - v == 0 end,
  positive = function(v) return type(v) == "number" and v > 0 and v < math.huge end,
  nonnegative = function(v) return type(v) == "number" and v >= 0 and v < math.huge end,
  fraction = function(v) return type(v) == "number" and v >= 0 and v <= 1 end,
  decay = function(v) return type(v) == "number" and v >= 0 and v < 1 end,
  pair = function(v)
    return type(v) == "number" or (type(v) == "table" and #v == 2 and type(v[1]) == "number" and type(v[2]) == "number")
  end,
  callable = util.callable,
}
local names = {
  integer = "a whole number", count = "a whole number of at least 1", positive = "a finite number above 0",
  nonnegative = "a finite number of at least 0", fraction = "a number from 0 to 1", decay = "a number from 0 to less than 1", pair =
    "a number or a pair {a, b}",
  callable = "a function", number = "a number", string = "a string", boolean = "true or false", table = "a table",
}

local function fits(v, kind)
  for one in kind:gmatch("[^|]+") do
    local test = kinds[one]
    if test then
      if test(v) then return true end
    elseif type(v) == one or util.kind(v) == one then
      return true
    end
  end
  return false
end

--- Checks one value: kind is a Lua type, a word of the list above, a kind's name (`module`), or several with `|`.
function util.check(what, v, kind, where)
  if fits(v, kind) then return v end
  local wanted = {}
  for one in kind:gmatch("[^|]+") do wanted[#wanted + 1] = names[one] or ("a " .. one) end
  util.fail_at(where, "%s wants %s, got %s (%s)", what, table.concat(wanted, " or "), util.show(v), util.kind(v))
end

--- Checks an option table against a list of { key, kind, default, alias=, required=true, choices={} }; returns a new
--- table with the defaults filled in. `what` names the taker in messages. nil counts as {}.
function util.options(what, given, spec, where)
  if given == nil then given = {} end
  if type(given) ~= "table" or getmetatable(given) ~= nil then
    util.fail_at(where, "%s wants a table of options, got %s (%s)", what, util.show(given), util.kind(given))
  end
  local known, row_of, out = {}, {}, {}
  for i, row in ipairs(spec) do
    known[i] = row[1]
    row_of[row[1]] = row
    if row.alias then row_of[row.alias] = row end
  end
  for key, value in util.sorted(given) do
    local row = row_of[key]
    if not row then
      if type(key) == "number" then
        util.fail_at(where, "%s takes named options, got %s without a name; %s", what, util.show(value),
          #known > 0 and "write " .. known[1] .. " = ..." or "it takes none")
      end
      util.fail_at(where, "%s has no option '%s'; %s", what, tostring(key), util.suggest(key, known))
    end
    if out[row[1]] ~= nil then util.fail_at(where, "%s has both '%s' and '%s'; give one", what, row[1], row.alias) end
    util.check(what .. ": " .. key, value, row[2], where)
    if row.choices then
      local ok = false
      for _, c in ipairs(row.choices) do ok = ok or c == value end
      if not ok then
        util.fail_at(where, "%s: %s = %s is unknown; did you mean '%s'? (known: %s)", what, key, util.show(value),
          util.nearest(tostring(value), row.choices), table.concat(row.choices, ", "))
      end
    end
    out[row[1]] = value
  end
  for _, row in ipairs(spec) do
    if out[row[1]] == nil then
      if row.required then
        util.fail_at(where, "%s needs '%s' (%s); it is missing", what, row[1], names[row[2]] or row[2])
      end
      out[row[1]] = row[3]
    end
  end
  return out
end

--- A pair from a number or a pair.
function util.pair(v)
  if type(v) == "table" then return { v[1], v[2] } end
  return { v, v }
end

--- 1234567 -> "1,234,567"
function util.commas(n)
  local text = ("%d"):format(n)
  local sign, digits = text:match("^(-?)(%d+)$")
  digits = digits:reverse():gsub("(%d%d%d)", "%1,"):reverse():gsub("^,", "")
  return sign .. digits
end

local escapes = { ['"'] = '\\"', ["\\"] = "\\\\", ["\n"] = "\\n", ["\r"] = "\\r", ["\t"] = "\\t" }

local Array = {}

--- Marks a table as a list, also when it is empty.
function util.array(t) return setmetatable(t, Array) end

--- JSON of a value. Tables with a `[1]` and util.array's are lists; keys go in the order of `order` (a list), then sorted.
function util.json(v, order)
  if type(v) == "string" then
    return '"' .. v:gsub('[%c"\\]', function(c) return escapes[c] or ("\\u%04x"):format(c:byte()) end) .. '"'
  elseif type(v) == "number" then
    if math.type(v) == "integer" then return ("%d"):format(v) end
    if v - v ~= 0 then return "null" end
    if v == math.floor(v) and math.abs(v) < 1e15 then return ("%.1f"):format(v) end
    return ("%.9g"):format(v)
  elseif type(v) ~= "table" then
    return v == nil and "null" or tostring(v)
  end
  if v[1] ~= nil or getmetatable(v) == Array then
    return "[" .. table.concat(util.map(v, function(x) return util.json(x) end), ",") .. "]"
  end
  local parts, seen = {}, {}
  local function put(k)
    if v[k] ~= nil and not seen[k] then
      seen[k] = true
      parts[#parts + 1] = util.json(tostring(k)) .. ":" .. util.json(v[k])
    end
  end
  for _, k in ipairs(order or {}) do put(k) end
  for _, k in ipairs(util.keys(v)) do put(k) end
  return "{" .. table.concat(parts, ",") .. "}"
end

--- 3725 -> "1 h 02 min"; 65 -> "1 min 05 s"; 4.2 -> "4 s"
function util.duration(s)
  if s - s ~= 0 then return "?" end
  s = math.floor(s + 0.5)
  if s >= 3600 then return ("%d h %02d min"):format(s // 3600, s % 3600 // 60) end
  if s >= 60 then return ("%d min %02d s"):format(s // 60, s % 60) end
  return ("%d s"):format(s)
end

--- Bytes as text: "1.25 MB" (1 MB = 10^6 bytes).
function util.bytes(n)
  for _, u in ipairs { { 1e9, "GB" }, { 1e6, "MB" }, { 1e3, "kB" } } do
    if n >= u[1] then return ("%.2f %s"):format(n / u[1], u[2]) end
  end
  return ("%d B"):format(n)
end

--- Makes reading an unknown name of a library table an error that suggests the nearest known one.
function util.strict(t, name)
  return setmetatable(t, { __index = function(_, key)
    if type(key) ~= "string" then return nil end
    util.fail("%s.%s does not exist; did you mean '%s.%s'?", name, key, name, util.nearest(key, util.keys(t)))
  end })
end

return util
