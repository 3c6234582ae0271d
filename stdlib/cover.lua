-- Pairwise covering sets: few rows of choices in which each two values of two factors that may occur together do. Greedy, and
-- the same in every process. `dtrain check --all` and the tests use it.

--- factors: list of { name, { values } }; valid(row): whether the choices so far (row[name], nil where none was made yet) may
--- stand together. Returns a list of rows { [name] = value }.
local function cover(factors, valid)
  local open, order = {}, {} -- pairs "i a j b" (factor numbers, value numbers) that no row has yet
  for i = 1, #factors do
    for j = i + 1, #factors do
      for a = 1, #factors[i][2] do
        for b = 1, #factors[j][2] do
          local pair = { i, a, j, b }
          order[#order + 1] = pair
          open[table.concat(pair, " ")] = true
        end
      end
    end
  end
  local at, row -- value number by factor number; the row that valid sees

  local function gain(i, a)
    local n = 0
    for j in ipairs(factors) do
      if at[j] then
        local key = i < j and ("%d %d %d %d"):format(i, a, j, at[j]) or ("%d %d %d %d"):format(j, at[j], i, a)
        if open[key] then n = n + 1 end
      end
    end
    return n
  end
  local function put(i, a)
    at[i] = a
    row[factors[i][1]] = a and factors[i][2][a]
  end
  -- Completes the row from factor i on, values that cover more first; false when it cannot be.
  local function complete(i)
    while at[i] do i = i + 1 end
    if i > #factors then return true end
    local choices = {}
    for a = 1, #factors[i][2] do choices[a] = { gain(i, a), a } end
    table.sort(choices, function(x, y)
      if x[1] ~= y[1] then return x[1] > y[1] end
      return x[2] < y[2]
    end)
    for _, c in ipairs(choices) do
      put(i, c[2])
      if valid(row) and complete(i + 1) then return true end
      put(i, nil)
    end
    return false
  end

  local rows = {}
  if #factors == 1 then
    for a in ipairs(factors[1][2]) do rows[a] = { [factors[1][1]] = factors[1][2][a] } end
    return rows
  end
  for _, pair in ipairs(order) do
    local key = table.concat(pair, " ")
    if open[key] then
      at, row = {}, {}
      put(pair[1], pair[2])
      put(pair[3], pair[4])
      if valid(row) and complete(1) then
        for i = 1, #factors do
          for j = i + 1, #factors do open[("%d %d %d %d"):format(i, at[i], j, at[j])] = nil end
        end
        rows[#rows + 1] = row
      else
        open[key] = nil -- never together
      end
    end
  end
  return rows
end

return cover
